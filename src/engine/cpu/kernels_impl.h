// The kernels as templates over an instruction set (vectors.h); kernels_*.cpp make one table each.
#pragma once

#include "engine/cpu/kernels.h"
#include "engine/cpu/vectors.h"
#include "model/activation/dispatch.h"
#include "model/bf16.h"

namespace clowder::cpu {

// Terms whose panel [kTermBlock][kLanes] (16 KB) and converted weights (9 or 16 KB) share a first-level cache of 32 KB.
inline constexpr int kTermBlock = 128;
// Keeps rows of converted weights off one another's cache sets.
inline constexpr int kTermStride = kTermBlock + 16;
// Outputs that are converted at once where they lie side by side: a cache line of bf16, so that no line is read twice.
inline constexpr int kColumnStep = 32;

template <class V>
void pack_rows(const bf16* const* rows, int count, int terms, float* panel) {
  constexpr int kWidth = V::kWidth;
  for (int lane = 0; lane < kLanes; lane += kWidth) {
    for (int k = 0; k < terms; k += kWidth) {
      typename V::Floats square[kWidth];
      for (int i = 0; i < kWidth; ++i) {
        square[i] = lane + i < count ? load_bf16<V>(rows[lane + i] + k) : typename V::Floats{};
      }
      transpose_square<V>(square);
      for (int i = 0; i < kWidth; ++i) store<V>(panel + (k + i) * kLanes + lane, square[i]);
    }
  }
}

template <class V>
void pack_columns(const bf16* rows, std::int64_t stride, int terms, float* panel) {
  for (int k = 0; k < terms; ++k) {
    for (int lane = 0; lane < kLanes; lane += V::kWidth) {
      store<V>(panel + k * kLanes + lane, load_bf16<V>(rows + k * stride + lane));
    }
  }
}

template <class V>
void unpack_rows(const float* sums, int outputs, int count, bf16* const* rows) {
  constexpr int kWidth = V::kWidth;
  for (int lane = 0; lane < count; lane += kWidth) {
    for (int n = 0; n < outputs; n += kWidth) {
      typename V::Floats square[kWidth];
      for (int i = 0; i < kWidth; ++i) square[i] = load<V>(sums + (n + i) * kLanes + lane);
      transpose_square<V>(square);
      for (int i = 0; i < kWidth && lane + i < count; ++i) store_bf16<V>(rows[lane + i] + n, square[i]);
    }
  }
}

template <class V>
void transpose(const float* sums, int outputs, std::int64_t stride, float* rows) {
  constexpr int kWidth = V::kWidth;
  for (int lane = 0; lane < kLanes; lane += kWidth) {
    for (int n = 0; n < outputs; n += kWidth) {
      typename V::Floats square[kWidth];
      for (int i = 0; i < kWidth; ++i) square[i] = load<V>(sums + (n + i) * kLanes + lane);
      transpose_square<V>(square);
      for (int i = 0; i < kWidth; ++i) store<V>(rows + (lane + i) * stride + n, square[i]);
    }
  }
}

// Weights of kOutputsByTerms as floats: kOutputStep outputs, element (n, k) at to[n * kTermStride + k].
template <class V>
CLOWDER_HD_INLINE void convert_rows(const WeightView& weights, int n, int k, int terms, float* to) {
  for (int i = 0; i < kOutputStep; ++i) {
    const bf16* row = weights.data + (n + i) * weights.stride + k;
    for (int j = 0; j < terms; j += V::kWidth) store<V>(to + i * kTermStride + j, load_bf16<V>(row + j));
  }
}

// Weights of kTermsByOutputs as floats: up to kColumnStep outputs, element (n, k) at to[k * kColumnStep + n].
template <class V>
CLOWDER_HD_INLINE void convert_columns(const WeightView& weights, int n, int k, int outputs, int terms, float* to) {
  for (int j = 0; j < terms; ++j) {
    const bf16* row = weights.data + (k + j) * weights.stride + n;
    for (int i = 0; i < outputs; i += V::kWidth) store<V>(to + j * kColumnStep + i, load_bf16<V>(row + i));
  }
}

// `Outputs` outputs by `Vectors` vectors of lanes, held in registers over `terms` terms.
template <class V, int Outputs, int Vectors, int OutputStride, int TermStride>
CLOWDER_HD_INLINE void multiply_tile(const float* panel, const float* weights, int terms, float* sums) {
  typename V::Floats accumulators[Outputs][Vectors];
  for (int n = 0; n < Outputs; ++n) {
    for (int v = 0; v < Vectors; ++v) accumulators[n][v] = load<V>(sums + n * kLanes + v * V::kWidth);
  }
  for (int k = 0; k < terms; ++k) {
    typename V::Floats rows[Vectors];
    for (int v = 0; v < Vectors; ++v) rows[v] = load<V>(panel + k * kLanes + v * V::kWidth);
    for (int n = 0; n < Outputs; ++n) {
      const auto weight = broadcast<V>(weights[n * OutputStride + k * TermStride]);
      for (int v = 0; v < Vectors; ++v) accumulators[n][v] = V::fused(weight, rows[v], accumulators[n][v]);
    }
  }
  for (int n = 0; n < Outputs; ++n) {
    for (int v = 0; v < Vectors; ++v) store<V>(sums + n * kLanes + v * V::kWidth, accumulators[n][v]);
  }
}

// kOutputStep outputs of the lanes up to `lanes`, rounded up to tiles. Where one vector holds them all, the tile is as
// many times taller as it is narrower.
template <class V, int OutputStride, int TermStride>
CLOWDER_HD_INLINE void multiply_step(const float* panel, const float* weights, int terms, int lanes, float* sums) {
  constexpr int kTall = V::kTileOutputs * V::kTileVectors;
  if constexpr (kTall <= kOutputStep) {
    if (lanes <= V::kWidth) {
      for (int n = 0; n < kOutputStep; n += kTall) {
        multiply_tile<V, kTall, 1, OutputStride, TermStride>(panel, weights + n * OutputStride, terms,
                                                             sums + n * kLanes);
      }
      return;
    }
  }
  for (int n = 0; n < kOutputStep; n += V::kTileOutputs) {
    for (int lane = 0; lane < lanes; lane += V::kTileVectors * V::kWidth) {
      multiply_tile<V, V::kTileOutputs, V::kTileVectors, OutputStride, TermStride>(
          panel + lane, weights + n * OutputStride, terms, sums + n * kLanes + lane);
    }
  }
}

template <class V>
void multiply(const float* panel, const WeightView& weights, int terms, int outputs, int lanes, float* sums) {
  alignas(64) float converted[kColumnStep * kTermBlock];
  static_assert(kOutputStep * kTermStride <= kColumnStep * kTermBlock);
  for (int k = 0; k < terms; k += kTermBlock) {
    const int some = terms - k < kTermBlock ? terms - k : kTermBlock;
    const float* rows = panel + k * kLanes;
    if (weights.layout == WeightLayout::kOutputsByTerms) {
      for (int n = 0; n < outputs; n += kOutputStep) {
        convert_rows<V>(weights, n, k, some, converted);
        multiply_step<V, kTermStride, 1>(rows, converted, some, lanes, sums + n * kLanes);
      }
      continue;
    }
    for (int n = 0; n < outputs; n += kColumnStep) {
      const int wide = outputs - n < kColumnStep ? outputs - n : kColumnStep;
      convert_columns<V>(weights, n, k, wide, some, converted);
      for (int i = 0; i < wide; i += kOutputStep) {
        multiply_step<V, 1, kColumnStep>(rows, converted + i, some, lanes, sums + (n + i) * kLanes);
      }
    }
  }
}

CLOWDER_HD_INLINE float round_to_bf16(float value) { return to_float(to_bf16(value)); }

template <class V>
void activate(const Activation& activation, const float* __restrict gate, const float* __restrict up, int outputs,
              float* __restrict hidden) {
  with_activation(activation, [&](auto f) {
    for (int i = 0; i < outputs * kLanes; ++i) hidden[i] = f.value(round_to_bf16(gate[i]), round_to_bf16(up[i]));
  });
}

// One output of a hidden-gradient tile. The arrays do not overlap.
template <class Gated>
CLOWDER_HD_INLINE void hidden_gradient_row(Gated f, const float* __restrict gate, const float* __restrict up,
                                           const float* __restrict weights, float* __restrict dh, float* __restrict du,
                                           float* __restrict weighted_hidden, float* __restrict dw) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto gradient = f.gradient(gate[lane], up[lane]);
    const float hidden = round_to_bf16(gradient.value);
    const float weighted = weights[lane] * dh[lane];
    dw[lane] += dh[lane] * hidden;
    dh[lane] = weighted * gradient.dg;
    du[lane] = weighted * gradient.du;
    weighted_hidden[lane] = weights[lane] * hidden;
  }
}

template <class V>
void hidden_gradient(const Activation& activation, const HiddenTile& tile) {
  for (int lane = 0; lane < kLanes; ++lane) tile.dw[lane] = 0.0f;
  with_activation(activation, [&](auto f) {
    for (int n = 0; n < tile.outputs; ++n) {
      const int i = n * kLanes;
      hidden_gradient_row(f, tile.gate + i, tile.up + i, tile.weights, tile.dh + i, tile.du + i,
                          tile.weighted_hidden + i, tile.dw);
    }
  });
}

template <class V>
void combine(const float* base, const bf16* const* rows, const float* weights, int count, int columns, bf16* out) {
  for (int c = 0; c < columns; c += V::kWidth) {
    auto sum = base == nullptr ? typename V::Floats{} : load<V>(base + c);
    for (int i = 0; i < count; ++i) sum = V::fused(broadcast<V>(weights[i]), load_bf16<V>(rows[i] + c), sum);
    store_bf16<V>(out + c, sum);
  }
}

template <class V>
void store_gradient(const float* sums, int outputs, GradientMode mode, void* gradient, std::int64_t stride) {
  for (int n = 0; n < outputs; ++n) {
    bf16* half = static_cast<bf16*>(gradient) + n * stride;
    float* full = static_cast<float*>(gradient) + n * stride;
    for (int c = 0; c < kLanes; c += V::kWidth) {
      const auto sum = load<V>(sums + n * kLanes + c);
      switch (mode) {
        case GradientMode::kWriteBf16:
          store_bf16<V>(half + c, sum);
          break;
        case GradientMode::kAccumulateBf16:
          store_bf16<V>(half + c, load_bf16<V>(half + c) + sum);
          break;
        case GradientMode::kWriteFp32:
          store<V>(full + c, sum);
          break;
        case GradientMode::kAccumulateFp32:
          store<V>(full + c, load<V>(full + c) + sum);
          break;
      }
    }
  }
}

template <class V>
constexpr Kernels make_kernels(const char* name) {
  return {name,         pack_rows<V>, pack_columns<V>,    multiply<V>, unpack_rows<V>,
          transpose<V>, activate<V>,  hidden_gradient<V>, combine<V>,  store_gradient<V>};
}

}  // namespace clowder::cpu

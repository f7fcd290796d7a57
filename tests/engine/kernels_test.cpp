// The CPU engine's kernels: the same bits on every instruction set, and those of a plain loop of fused multiply-adds.
#include "engine/cpu/kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "model/all_activations.h"
#include "model/bf16.h"

namespace clowder::cpu {
namespace {

class Random {
 public:
  explicit Random(std::uint32_t seed) : engine_(seed) {}
  float normal() { return distribution_(engine_); }
  int below(int n) { return static_cast<int>(engine_() % static_cast<std::uint32_t>(n)); }
  std::vector<bf16> matrix(int count) {
    std::vector<bf16> values(static_cast<std::size_t>(count));
    for (bf16& value : values) value = to_bf16(normal());
    return values;
  }
  std::vector<float> floats(int count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) value = normal();
    return values;
  }

 private:
  std::mt19937 engine_;
  std::normal_distribution<float> distribution_;
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

bool same_bits(const std::vector<bf16>& a, const std::vector<bf16>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(bf16)) == 0;
}

template <class T>
std::vector<T*> row_pointers(std::vector<T>& matrix, int stride) {
  std::vector<T*> rows;
  for (int i = 0; i < kLanes; ++i) rows.push_back(matrix.data() + i * stride);
  return rows;
}

class EveryInstructionSet : public testing::TestWithParam<const Kernels*> {
 protected:
  const Kernels& kernels_ = *GetParam();
};

TEST_P(EveryInstructionSet, ProductsAreChainsOfFusedMultiplyAddsInOrder) {
  Random random(1);
  for (int round = 0; round < 12; ++round) {
    const int terms = 16 * (1 + random.below(40));
    const int outputs = 16 * (1 + random.below(4));
    const int count = 1 + random.below(kLanes);
    std::vector<bf16> x = random.matrix(kLanes * terms);
    const std::vector<bf16> weights = random.matrix(outputs * terms);
    std::vector<bf16> transposed(weights.size());
    for (int n = 0; n < outputs; ++n) {
      for (int k = 0; k < terms; ++k) transposed[k * outputs + n] = weights[n * terms + k];
    }
    const std::vector<float> start = random.floats(outputs * kLanes);
    std::vector<float> expected = start;
    for (int n = 0; n < outputs; ++n) {
      for (int lane = 0; lane < count; ++lane) {
        float& sum = expected[n * kLanes + lane];
        for (int k = 0; k < terms; ++k) {
          sum = std::fma(to_float(weights[n * terms + k]), to_float(x[lane * terms + k]), sum);
        }
      }
    }
    std::vector<float> panel(terms * kLanes, std::numeric_limits<float>::quiet_NaN());
    kernels_.pack_rows(row_pointers(x, terms).data(), count, terms, panel.data());
    std::vector<float> sums = start;
    kernels_.multiply(panel.data(), {weights.data(), terms, WeightLayout::kOutputsByTerms}, terms, outputs, count,
                      sums.data());
    EXPECT_TRUE(same_bits(sums, expected));
    sums = start;
    kernels_.multiply(panel.data(), {transposed.data(), outputs, WeightLayout::kTermsByOutputs}, terms, outputs, count,
                      sums.data());
    EXPECT_TRUE(same_bits(sums, expected));
  }
}

TEST_P(EveryInstructionSet, AProductMayBeSplitAnywhere) {
  Random random(2);
  const int terms = 96;
  const int outputs = 32;
  const std::vector<float> panel = random.floats(terms * kLanes);
  const std::vector<bf16> weights = random.matrix(outputs * terms);
  const WeightView whole{weights.data(), outputs, WeightLayout::kTermsByOutputs};
  std::vector<float> expected(outputs * kLanes);
  kernels_.multiply(panel.data(), whole, terms, outputs, kLanes, expected.data());
  for (int split = 0; split <= terms; ++split) {
    std::vector<float> sums(outputs * kLanes);
    kernels_.multiply(panel.data(), whole, split, outputs, kLanes, sums.data());
    const WeightView rest{weights.data() + split * outputs, outputs, WeightLayout::kTermsByOutputs};
    kernels_.multiply(panel.data() + split * kLanes, rest, terms - split, outputs, kLanes, sums.data());
    EXPECT_TRUE(same_bits(sums, expected)) << split;
  }
}

TEST_P(EveryInstructionSet, PackingAndUnpackingKeepEveryElement) {
  Random random(3);
  for (const int count : {1, 7, 16, 31, 32}) {
    const int columns = 48;
    const int stride = 64;
    std::vector<bf16> matrix = random.matrix(kLanes * stride);
    std::vector<float> panel(columns * kLanes, std::numeric_limits<float>::quiet_NaN());
    kernels_.pack_rows(row_pointers(matrix, stride).data(), count, columns, panel.data());
    for (int k = 0; k < columns; ++k) {
      for (int lane = 0; lane < kLanes; ++lane) {
        EXPECT_EQ(panel[k * kLanes + lane], lane < count ? to_float(matrix[lane * stride + k]) : 0.0f);
      }
    }
    std::vector<bf16> result(matrix.size(), bf16{0x1234});
    std::vector<bf16> expected = result;
    for (int lane = 0; lane < count; ++lane) {
      for (int k = 0; k < columns; ++k) expected[lane * stride + k] = matrix[lane * stride + k];
    }
    kernels_.unpack_rows(panel.data(), columns, count, row_pointers(result, stride).data());
    EXPECT_TRUE(same_bits(result, expected)) << count;
    std::vector<float> rows(kLanes * stride);
    kernels_.transpose(panel.data(), columns, stride, rows.data());
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int k = 0; k < columns; ++k) EXPECT_EQ(rows[lane * stride + k], panel[k * kLanes + lane]);
    }
  }
  const std::vector<bf16> matrix = random.matrix(10 * 80);
  std::vector<float> panel(10 * kLanes);
  kernels_.pack_columns(matrix.data() + 3, 80, 10, panel.data());
  for (int k = 0; k < 10; ++k) {
    for (int lane = 0; lane < kLanes; ++lane) EXPECT_EQ(panel[k * kLanes + lane], to_float(matrix[k * 80 + 3 + lane]));
  }
}

TEST_P(EveryInstructionSet, ActivationsAreTheModels) {
  Random random(4);
  const int outputs = 16;
  const int count = outputs * kLanes;
  for (const Activation& activation : all_activations()) {
    const std::vector<float> gate = random.floats(count);
    const std::vector<float> up = random.floats(count);
    std::vector<float> hidden(count);
    kernels_.activate(activation, gate.data(), up.data(), outputs, hidden.data());
    const std::vector<float> weights = random.floats(kLanes);
    const std::vector<float> dh = random.floats(count);
    std::vector<float> dg = dh;
    std::vector<float> du(count), weighted(count), dw(kLanes);
    kernels_.hidden_gradient(activation, {outputs, gate.data(), up.data(), weights.data(), dg.data(), du.data(),
                                          weighted.data(), dw.data()});
    std::vector<float> expected_dw(kLanes);
    for (int i = 0; i < count; ++i) {
      const float g = to_float(to_bf16(gate[i]));
      const float u = to_float(to_bf16(up[i]));
      EXPECT_EQ(hidden[i], with_activation(activation, [&](auto f) { return f.value(g, u); }));
      const auto gradient = with_activation(activation, [&](auto f) { return f.gradient(gate[i], up[i]); });
      const float h = to_float(to_bf16(gradient.value));
      const float w = weights[i % kLanes];
      EXPECT_EQ(dg[i], w * dh[i] * gradient.dg);
      EXPECT_EQ(du[i], w * dh[i] * gradient.du);
      EXPECT_EQ(weighted[i], w * h);
      expected_dw[i % kLanes] += dh[i] * h;
    }
    EXPECT_TRUE(same_bits(dw, expected_dw));
  }
}

TEST_P(EveryInstructionSet, SlotsAreAddedInOrderWithOneRounding) {
  Random random(5);
  const int columns = 64;
  std::vector<bf16> rows = random.matrix(16 * columns);
  for (int count = 0; count <= 16; ++count) {
    const std::vector<float> weights = random.floats(16);
    const std::vector<float> base = random.floats(columns);
    std::vector<const bf16*> pointers;
    for (int i = 0; i < count; ++i) pointers.push_back(rows.data() + i * columns);
    for (const float* start : {base.data(), static_cast<const float*>(nullptr)}) {
      std::vector<bf16> expected;
      for (int c = 0; c < columns; ++c) {
        float sum = start == nullptr ? 0.0f : start[c];
        for (int i = 0; i < count; ++i) sum = std::fma(weights[i], to_float(pointers[i][c]), sum);
        expected.push_back(to_bf16(sum));
      }
      std::vector<bf16> out(columns);
      kernels_.combine(start, pointers.data(), weights.data(), count, columns, out.data());
      EXPECT_TRUE(same_bits(out, expected));
    }
  }
}

TEST_P(EveryInstructionSet, GradientsAreWrittenOrAdded) {
  Random random(6);
  const int outputs = 16;
  const int stride = 48;
  const std::vector<float> sums = random.floats(outputs * kLanes);
  const std::vector<bf16> before_half = random.matrix(outputs * stride);
  const std::vector<float> before_full = random.floats(outputs * stride);
  for (const GradientMode mode : {GradientMode::kWriteBf16, GradientMode::kAccumulateBf16, GradientMode::kWriteFp32,
                                  GradientMode::kAccumulateFp32}) {
    const bool adds = mode == GradientMode::kAccumulateBf16 || mode == GradientMode::kAccumulateFp32;
    std::vector<bf16> half = before_half;
    std::vector<float> full = before_full;
    std::vector<bf16> expected_half = half;
    std::vector<float> expected_full = full;
    for (int n = 0; n < outputs; ++n) {
      for (int c = 0; c < kLanes; ++c) {
        const float sum = sums[n * kLanes + c];
        bf16& h = expected_half[n * stride + c];
        float& f = expected_full[n * stride + c];
        h = to_bf16(adds ? to_float(h) + sum : sum);
        f = adds ? f + sum : sum;
      }
    }
    const bool is_half = mode == GradientMode::kWriteBf16 || mode == GradientMode::kAccumulateBf16;
    void* gradient = is_half ? static_cast<void*>(half.data()) : full.data();
    kernels_.store_gradient(sums.data(), outputs, mode, gradient, stride);
    EXPECT_TRUE(is_half ? same_bits(half, expected_half) : same_bits(full, expected_full));
  }
}

TEST_P(EveryInstructionSet, SpecialValuesAreRoundedAsTheModelRounds) {
  std::vector<float> values;
  for (std::uint32_t high = 0; high < 0x10000; high += 7) {
    for (const std::uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      values.push_back(bits_float(high << 16 | low));
    }
  }
  values.resize(values.size() / (16 * kLanes) * 16 * kLanes);
  for (std::size_t i = 0; i < values.size(); i += 16 * kLanes) {
    std::vector<bf16> rows(16 * kLanes);
    kernels_.unpack_rows(values.data() + i, 16, kLanes, row_pointers(rows, 16).data());
    for (int n = 0; n < 16; ++n) {
      for (int lane = 0; lane < kLanes; ++lane) {
        EXPECT_EQ(rows[lane * 16 + n].bits, to_bf16(values[i + n * kLanes + lane]).bits);
      }
    }
  }
}

std::vector<const Kernels*> all_usable() { return {usable_kernels().begin(), usable_kernels().end()}; }

INSTANTIATE_TEST_SUITE_P(Kernels, EveryInstructionSet, testing::ValuesIn(all_usable()),
                         [](const auto& set) { return std::string(set.param->name); });

}  // namespace
}  // namespace clowder::cpu

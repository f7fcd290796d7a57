// The CPU engine's arithmetic, once for each instruction set. All sets give the same bits: a sum over k is one chain of
// fp32 fused multiply-adds in the order of k, and every element has a lane of its own.
//
// Matrices of sums are held transposed, "output by lane": sums[n][lane], where a lane is one of the 32 rows of a row
// block (for weight gradients: one of 32 columns). Activations are packed likewise into a panel [k][lane], so that
// vectors run over lanes, and weights need no transposing. A row's bits cannot depend on its lane.
#pragma once

#include <cstdint>

#include "clowder/layer.h"
#include "clowder/types.h"

namespace clowder::cpu {

inline constexpr int kLanes = 32;
// Outputs of a product come in multiples of this; so do terms, but for those of kTermsByOutputs.
inline constexpr int kOutputStep = 16;

// How a weight matrix stands in memory.
enum class WeightLayout {
  kOutputsByTerms,  // element (n, k) at data[n * stride + k]
  kTermsByOutputs,  // element (n, k) at data[k * stride + n]
};

struct WeightView {
  const bf16* data;
  std::int64_t stride;
  WeightLayout layout;
};

// The operands of a hidden-gradient tile, each [outputs][kLanes], `weights` and `dw` [kLanes].
struct HiddenTile {
  int outputs;
  const float* gate;
  const float* up;
  const float* weights;  // of the rows' routes
  float* dh;             // in: dh_raw; out: dg
  float* du;
  float* weighted_hidden;
  float* dw;  // partial sum over this tile's outputs, in their order
};

struct Kernels {
  const char* name;

  // panel[k][lane] = rows[lane][k] for lane < count, else 0. terms: a multiple of kOutputStep.
  void (*pack_rows)(const bf16* const* rows, int count, int terms, float* panel);
  // panel[k][lane] = rows[k][lane] for kLanes columns.
  void (*pack_columns)(const bf16* rows, std::int64_t stride, int terms, float* panel);
  // sums[n][lane] += sum over k in order of weight(n, k) * panel[k][lane] for lane < lanes; of the other lanes, some
  // are added to as well. outputs: a multiple of kOutputStep.
  void (*multiply)(const float* panel, const WeightView& weights, int terms, int outputs, int lanes, float* sums);
  // rows[lane][n] = bf16(sums[n][lane]) for lane < count.
  void (*unpack_rows)(const float* sums, int outputs, int count, bf16* const* rows);
  // rows[lane * stride + n] = sums[n][lane], all lanes.
  void (*transpose)(const float* sums, int outputs, std::int64_t stride, float* rows);

  // hidden = f(bf16(gate), bf16(up)), elementwise [outputs][kLanes].
  void (*activate)(const Activation& activation, const float* gate, const float* up, int outputs, float* hidden);
  void (*hidden_gradient)(const Activation& activation, const HiddenTile& tile);
  // out[c] = bf16(base[c] + sum over i in order of weights[i] * rows[i][c]); base may be null. One fused multiply-add a
  // term.
  void (*combine)(const float* base, const bf16* const* rows, const float* weights, int count, int columns, bf16* out);
  // Stores sums[n][0 .. kLanes) at element n * stride of `gradient`.
  void (*store_gradient)(const float* sums, int outputs, GradientMode mode, void* gradient, std::int64_t stride);
};

// The widest instruction set of this machine, or the one that CLOWDER_CPU_ISA names ("baseline", "avx2", "avx512").
// Throws Error(kUnsupported) if that one is unknown or missing here.
const Kernels& kernels();

// Its name.
const char* cpu_engine_isa();

// Those that this build has and this machine can run, widest first.
struct KernelList {
  const Kernels* const* begin_;
  const Kernels* const* end_;
  const Kernels* const* begin() const { return begin_; }
  const Kernels* const* end() const { return end_; }
};
KernelList usable_kernels();

extern const Kernels kBaselineKernels;
#ifdef CLOWDER_HAS_X86_KERNELS
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace clowder::cpu

// The kernels for whatever the compiler targets by default, four floats at a time.
#include "engine/cpu/kernels_impl.h"

namespace clowder::cpu {
namespace {

struct Baseline : VectorTypes<4> {
  static constexpr int kWidth = 4;
  static constexpr int kTileOutputs = 4;
  static constexpr int kTileVectors = 2;

  // One instruction where the target has it, else the C library's: exact everywhere.
  CLOWDER_HD_INLINE static Floats fused(Floats a, Floats b, Floats c) {
    for (int i = 0; i < kWidth; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
  }
  CLOWDER_HD_INLINE static Words widen(Halves halves) { return __builtin_convertvector(halves, Words); }
  CLOWDER_HD_INLINE static Halves narrow(Words words) { return __builtin_convertvector(words, Halves); }
  CLOWDER_HD_INLINE static Floats interleave_low(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 4, 1, 5);
  }
  CLOWDER_HD_INLINE static Floats interleave_high(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 2, 6, 3, 7);
  }
};

}  // namespace

constinit const Kernels kBaselineKernels = make_kernels<Baseline>("baseline");

}  // namespace clowder::cpu

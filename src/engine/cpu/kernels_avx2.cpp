// The kernels for x86-64 with AVX2 and FMA.
#include <immintrin.h>

#include "engine/cpu/kernels_impl.h"

namespace clowder::cpu {
namespace {

struct Avx2 : VectorTypes<8> {
  static constexpr int kWidth = 8;
  // 8 of the 16 registers are accumulators: as many as two units with a latency of four keep busy.
  static constexpr int kTileOutputs = 4;
  static constexpr int kTileVectors = 2;

  CLOWDER_HD_INLINE static Floats fused(Floats a, Floats b, Floats c) {
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  }
  CLOWDER_HD_INLINE static Words widen(Halves halves) { return (Words)_mm256_cvtepu16_epi32((__m128i)halves); }
  CLOWDER_HD_INLINE static Halves narrow(Words words) { return __builtin_convertvector(words, Halves); }
  CLOWDER_HD_INLINE static Floats interleave_low(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  }
  CLOWDER_HD_INLINE static Floats interleave_high(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
  }
};

}  // namespace

constinit const Kernels kAvx2Kernels = make_kernels<Avx2>("avx2");

}  // namespace clowder::cpu

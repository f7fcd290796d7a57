// The kernels for x86-64 with AVX-512.
#include <immintrin.h>

#include "engine/cpu/kernels_impl.h"

namespace clowder::cpu {
namespace {

struct Avx512 : VectorTypes<16> {
  static constexpr int kWidth = 16;
  // 16 of the 32 registers are accumulators; weights are broadcast from memory by the multiply-add itself.
  static constexpr int kTileOutputs = 8;
  static constexpr int kTileVectors = 2;

  CLOWDER_HD_INLINE static Floats fused(Floats a, Floats b, Floats c) {
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  }
  // Intrinsics without a mask make g++ 12 warn of an uninitialised operand.
  static constexpr __mmask16 kAll = 0xffff;

  CLOWDER_HD_INLINE static Words widen(Halves halves) {
    return (Words)_mm512_maskz_cvtepu16_epi32(kAll, (__m256i)halves);
  }
  CLOWDER_HD_INLINE static Halves narrow(Words words) {
    return (Halves)_mm512_maskz_cvtepi32_epi16(kAll, (__m512i)words);
  }
  CLOWDER_HD_INLINE static Floats interleave_low(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  }
  CLOWDER_HD_INLINE static Floats interleave_high(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
};

}  // namespace

constinit const Kernels kAvx512Kernels = make_kernels<Avx512>("avx512");

}  // namespace clowder::cpu

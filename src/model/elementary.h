// Elementary functions whose bits depend neither on a C library nor on an instruction set: IEEE additions,
// multiplications and divisions in a fixed order, branch-free so that loops over them vectorise. A NaN stays a NaN.
//
// The fp64 overloads are the C library's. They serve references and bounds, so that one formula reads the same in both.
#pragma once

#include <cmath>
#include <cstdint>

#include "model/bf16.h"
#include "model/host_device.h"

namespace clowder {

// e^x to within 2 units in the last place; 0 and infinity beyond the range of binary32.
//
// x = n ln 2 + r with |r| <= ln 2 / 2, e^r by its Taylor polynomial of degree 7 (remainder below 2^-27), and 2^n in two
// factors, because n reaches beyond the exponents of normal numbers.
CLOWDER_HD_INLINE float exponential(float x) {
  constexpr float kHighest = 89.0f;
  constexpr float kLowest = -104.0f;
  constexpr float kLog2E = 1.44269504f;
  constexpr float kLn2High = 0.693359375f;  // 10 bits: n * kLn2High is exact
  constexpr float kLn2Low = -2.12194440e-4f;
  constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2^23

  x = x > kHighest ? kHighest : x;
  x = x < kLowest ? kLowest : x;
  const float shifted = x * kLog2E + kRoundToInteger;
  const std::uint32_t n_bits = float_bits(shifted) - float_bits(kRoundToInteger);
  const float n = shifted - kRoundToInteger;
  const float r = (x - n * kLn2High) - n * kLn2Low;

  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;

  const std::uint32_t half = static_cast<std::uint32_t>(static_cast<std::int32_t>(n_bits) >> 1);
  const float first = bits_float((half + 127u) << 23);
  const float second = bits_float((n_bits - half + 127u) << 23);
  return p * first * second;
}

inline double exponential(double x) { return std::exp(x); }

#ifdef __CUDACC__
// A GPU's own exponential and reciprocal: 2^-21 of relative error, far below the rounding to bf16 that follows, and the
// same bits on every GPU of an architecture. What is below the normal numbers is 0.
__device__ __forceinline__ float fast_sigmoid(float x) {
  constexpr float kLog2E = 1.44269504f;
  float power, result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-kLog2E * x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
  return result;
}
#endif

template <class Real>
CLOWDER_HD_INLINE Real sigmoid(Real x) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(Real) == sizeof(float)) return fast_sigmoid(x);
#endif
  return Real{1} / (Real{1} + exponential(-x));
}

}  // namespace clowder

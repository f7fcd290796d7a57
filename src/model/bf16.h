// bfloat16 <-> binary32, round to nearest even, on host and device alike. A NaN stays a (quiet) NaN.
#pragma once

#include <cstdint>

#include "clowder/types.h"
#include "model/host_device.h"

namespace clowder {

CLOWDER_HD_INLINE std::uint32_t float_bits(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  return __builtin_bit_cast(std::uint32_t, value);
#endif
}

CLOWDER_HD_INLINE float bits_float(std::uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

CLOWDER_HD_INLINE float to_float(bf16 value) { return bits_float(static_cast<std::uint32_t>(value.bits) << 16); }

// Branch-free, so that compilers vectorise loops over it.
CLOWDER_HD_INLINE bf16 to_bf16(float value) {
  const std::uint32_t bits = float_bits(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet_nan = (bits >> 16) | 0x40u;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return bf16{static_cast<std::uint16_t>(is_nan ? quiet_nan : rounded)};
}

}  // namespace clowder

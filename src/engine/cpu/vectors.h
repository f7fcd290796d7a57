// Vectors of floats by the compiler's own extension. A trait names an instruction set: its width, its fused
// multiply-add, and what compilers do not find by themselves. Everything is inlined, or a template over the trait, so
// that no code of a newer instruction set can be linked into another's place.
#pragma once

#include <cstdint>

#include "clowder/types.h"
#include "model/host_device.h"

namespace clowder::cpu {

template <int Width>
struct VectorTypes {
  using Floats [[gnu::vector_size(Width * 4)]] = float;
  using Words [[gnu::vector_size(Width * 4)]] = std::uint32_t;
  using Halves [[gnu::vector_size(Width * 2)]] = std::uint16_t;
};

template <class V>
CLOWDER_HD_INLINE typename V::Floats load(const float* from) {
  typename V::Floats value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

template <class V>
CLOWDER_HD_INLINE void store(float* to, typename V::Floats value) {
  __builtin_memcpy(to, &value, sizeof(value));
}

template <class V>
CLOWDER_HD_INLINE typename V::Floats broadcast(float value) {
  return value - typename V::Floats{};
}

template <class V>
CLOWDER_HD_INLINE typename V::Floats load_bf16(const bf16* from) {
  typename V::Halves halves;
  __builtin_memcpy(&halves, from, sizeof(halves));
  return (typename V::Floats)(V::widen(halves) << 16);
}

// As to_bf16 in model/bf16.h.
template <class V>
CLOWDER_HD_INLINE void store_bf16(bf16* to, typename V::Floats value) {
  using Words = typename V::Words;
  const Words bits = (Words)value;
  const Words is_nan = (Words)((bits & 0x7fffffffu) > 0x7f800000u);
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Words quiet_nan = (bits >> 16) | 0x40u;
  const Words chosen = (rounded & ~is_nan) | (quiet_nan & is_nan);
  const typename V::Halves halves = V::narrow(chosen);
  __builtin_memcpy(to, &halves, sizeof(halves));
}

// Transposes a square of V::kWidth vectors: log2(kWidth) rounds, each a perfect shuffle of the whole square.
template <class V>
CLOWDER_HD_INLINE void transpose_square(typename V::Floats (&square)[V::kWidth]) {
  constexpr int kWidth = V::kWidth;
  for (int round = 1; round < kWidth; round *= 2) {
    typename V::Floats shuffled[kWidth];
    for (int i = 0; i < kWidth / 2; ++i) {
      shuffled[2 * i] = V::interleave_low(square[i], square[i + kWidth / 2]);
      shuffled[2 * i + 1] = V::interleave_high(square[i], square[i + kWidth / 2]);
    }
    for (int i = 0; i < kWidth; ++i) square[i] = shuffled[i];
  }
}

}  // namespace clowder::cpu

// Readings of a GradientMode.
#pragma once

#include <cstddef>

#include "clowder/layer.h"

namespace clowder {

inline bool is_accumulating(GradientMode mode) {
  return mode == GradientMode::kAccumulateBf16 || mode == GradientMode::kAccumulateFp32;
}

inline bool is_bf16(GradientMode mode) {
  return mode == GradientMode::kWriteBf16 || mode == GradientMode::kAccumulateBf16;
}

// Of one element.
inline std::size_t gradient_bytes(GradientMode mode) { return is_bf16(mode) ? sizeof(bf16) : sizeof(float); }

}  // namespace clowder

// The check that all kinds of groups share.
#pragma once

#include <string>

#include "clowder/types.h"

namespace clowder {

inline constexpr int kMaxRanks = 1024;

inline void check_group_size(int size) {
  if (size < 1 || size > kMaxRanks) {
    throw Error(ErrorCode::kArgument,
                "ranks: " + std::to_string(size) + ", must be from 1 to " + std::to_string(kMaxRanks));
  }
}

}  // namespace clowder

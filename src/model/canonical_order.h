// The canonical order of a global batch (DESIGN: the schedule). It spreads pulls over all source ranks and depends on
// the global batch alone, never on the number of ranks.
#pragma once

#include <cstdint>

#include "model/host_device.h"

namespace clowder {

inline constexpr std::int64_t kCanonicalShards = 64;

CLOWDER_HD inline std::int64_t canonical_shard_length(std::int64_t global_tokens) {
  return (global_tokens + kCanonicalShards - 1) / kCanonicalShards;
}

// Positions to walk: every shard at full length. Positions whose token is >= global_tokens are skipped.
CLOWDER_HD inline std::int64_t canonical_positions(std::int64_t global_tokens) {
  return canonical_shard_length(global_tokens) * kCanonicalShards;
}

CLOWDER_HD inline std::int64_t canonical_token(std::int64_t position, std::int64_t global_tokens) {
  return (position % kCanonicalShards) * canonical_shard_length(global_tokens) + position / kCanonicalShards;
}

}  // namespace clowder

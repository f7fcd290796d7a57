// Layers of well-known models, by name, as benches of every engine take them.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "check/problem.h"

namespace clowder::bench {

// What one rank of a group holds and computes. With one rank, all routes stay on it: `dsv3-ep8` is the load that a rank
// of 8 has, 32 of 256 experts, without the peers.
struct Case {
  const char* name;
  int ranks;
  std::int64_t tokens;  // of one rank
  std::int64_t hidden;
  std::int64_t intermediate;
  std::int64_t shared_intermediate;  // 0: no shared expert
  std::int32_t num_experts;          // over all ranks
  std::int32_t topk;
};

std::span<const Case> all_cases();

// Throws Error(kArgument) that lists the names.
const Case& find_case(const std::string& name);

// The case as a problem, with `scale_tokens` in (0, 1] of its tokens, at least one a rank.
check::ProblemSpec make_spec(const Case& layer, double scale_tokens);

}  // namespace clowder::bench

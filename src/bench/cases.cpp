#include "bench/cases.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace clowder::bench {
namespace {

//                                  R      T     H      I    Is    E  K
constexpr Case kCases[] = {
    {"dsv3-ep8", 1, 8192, 7168, 2048, 2048, 32, 8},   {"dsv3-ep32", 1, 8192, 7168, 2048, 2048, 8, 8},
    {"qwen3-30b", 1, 16384, 2048, 768, 0, 128, 8},    {"qwen3-235b-ep8", 1, 16384, 4096, 1536, 0, 16, 8},
    {"olmoe-7b", 1, 16384, 2048, 1024, 0, 64, 8},     {"gpt-oss-like", 1, 16384, 2880, 2880, 0, 32, 4},
    {"qwen3-30b-ep8", 8, 8192, 2048, 768, 0, 128, 8}, {"mixtral-8x7b-ep8", 8, 8192, 4096, 14336, 0, 8, 2},
};

}  // namespace

std::span<const Case> all_cases() { return kCases; }

const Case& find_case(const std::string& name) {
  std::string names;
  for (const Case& candidate : kCases) {
    if (candidate.name == name) return candidate;
    names += (names.empty() ? "" : ", ") + std::string(candidate.name);
  }
  throw Error(ErrorCode::kArgument, "case: \"" + name + "\", must be one of " + names);
}

check::ProblemSpec make_spec(const Case& layer, double scale_tokens) {
  if (!(scale_tokens > 0.0 && scale_tokens <= 1.0)) {
    throw Error(ErrorCode::kArgument,
                "scale-tokens: " + std::to_string(scale_tokens) + ", must be above 0 and at most 1");
  }
  const auto scaled = std::llround(std::ceil(static_cast<double>(layer.tokens) * scale_tokens));
  check::ProblemSpec spec;
  spec.tokens_per_rank.assign(static_cast<std::size_t>(layer.ranks), std::max<std::int64_t>(scaled, 1));
  spec.hidden = layer.hidden;
  spec.intermediate = layer.intermediate;
  spec.shared_intermediate = layer.shared_intermediate;
  spec.num_experts = layer.num_experts;
  spec.topk = layer.topk;
  return spec;
}

}  // namespace clowder::bench

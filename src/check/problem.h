// Seeded data for one layer: what `clowder check` runs engines and the reference on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "clowder/layer.h"
#include "clowder/types.h"
#include "model/gradient_mode.h"

namespace clowder::check {

enum class RoutingKind {
  kUniform,  // K distinct experts a token where E >= K
  kZipf,     // the same, expert e with probability proportional to 1 / (e + 1)^value
  kHot,      // a fraction `value` of all slots goes to expert 0, the others anywhere else
  kOne,      // every slot goes to expert `expert`
  kFile,     // one token a line, K ids
};

struct Routing {
  RoutingKind kind = RoutingKind::kUniform;
  double value = 0.0;
  std::int32_t expert = 0;
  std::string path;
};

// "uniform", "zipf:S", "hot:F", "one:E" or "file:PATH"; throws Error(kArgument) otherwise.
Routing parse_routing(const std::string& text);

enum class TopkWeights {
  kUniform,       // uniform in (0, 1), normalised to a sum of 1
  kZeros,         // exactly 0
  kSigned,        // uniform in (-1, 1)
  kUnnormalised,  // uniform in (0, 3)
};

TopkWeights parse_topk_weights(const std::string& text);
// "bf16", "fp32", "accumulate-fp32" or "accumulate-bf16"
GradientMode parse_gradient_mode(const std::string& text);

struct ProblemSpec {
  std::vector<std::int64_t> tokens_per_rank = {256};
  std::int64_t hidden = 256;
  std::int64_t intermediate = 128;
  std::int64_t shared_intermediate = 0;
  std::int32_t num_experts = 8;
  std::int32_t topk = 2;
  Activation activation;
  Routing routing;
  double drop = 0.0;         // fraction of slots without a route
  std::int64_t bad_ids = 0;  // slots whose id is out of range
  TopkWeights topk_weights = TopkWeights::kUniform;
  double scale = 1.0;  // of x
  std::uint64_t seed = 0;
  GradientMode gradient_mode = GradientMode::kWriteBf16;
  bool forward_only = false;

  int num_ranks() const { return static_cast<int>(tokens_per_rank.size()); }
  std::int64_t tokens() const;
};

// `total` tokens over `ranks`, as evenly as can be, the first ranks the larger parts.
std::vector<std::int64_t> split_tokens(std::int64_t total, int ranks);

// Tensors of the global batch. Those of backward are empty with forward_only; main gradients hold bf16 values where the
// mode's are bf16, and are empty where it does not accumulate.
struct Problem {
  ProblemSpec spec;
  LayerShape shape;
  std::vector<bf16> x;                 // [T, H]
  std::vector<bf16> dout;              // [T, H]
  std::vector<std::int32_t> topk_idx;  // [T, K]
  std::vector<float> topk_weights;     // [T, K]
  std::vector<bf16> w13;               // [E, 2I, H]
  std::vector<bf16> w2;                // [E, H, I]
  std::vector<bf16> shared_w13;        // [2Is, H]
  std::vector<bf16> shared_w2;         // [H, Is]
  std::vector<float> main_w13;
  std::vector<float> main_w2;
  std::vector<float> main_shared_w13;
  std::vector<float> main_shared_w2;

  std::int64_t tokens() const { return spec.tokens(); }
  bool has_route(std::int64_t slot) const { return topk_idx[slot] >= 0 && topk_idx[slot] < shape.num_experts; }
};

// Throws Error(kArgument) where the spec cannot be met, a shape that no layer can have included.
Problem make_problem(const ProblemSpec& spec, int threads);

}  // namespace clowder::check

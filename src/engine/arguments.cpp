#include "engine/arguments.h"

#include <algorithm>
#include <limits>

#include "model/shape.h"

namespace clowder {
namespace {

constexpr std::int32_t kMostBlocks = 4096;
constexpr double kMostSeconds = 1e7;

void require_at_least(const char* name, std::int64_t value, std::int64_t least) {
  if (value < least) refuse_argument(name, std::to_string(value), "at least " + std::to_string(least));
}

// ceil(1.25 * max_tokens * K)
std::int64_t default_saved_rows(const LayerShape& shape) {
  const std::int64_t slots = shape.max_tokens * shape.topk;
  return slots + (slots + 3) / 4;
}

std::int64_t default_ring_rows(const LayerShape& shape, std::int64_t chunk_rows) {
  return std::max(plan::kChunksPerRing * chunk_rows, (default_saved_rows(shape) + 3) / 4);
}

// What the worst routing can fill: every slot of every rank on one rank, its experts' last blocks padded.
struct WorstCase {
  std::int64_t rows;
  std::int64_t padded_rows;
};

WorstCase worst_case(const LayerShape& shape, int num_ranks, const EngineLimits& limits) {
  const std::int64_t rows = num_ranks * shape.max_tokens * shape.topk;
  const std::int64_t blocks = rows / limits.block_rows + experts_per_rank(shape, num_ranks);
  const std::int64_t tasks = blocks * (1 + limits.tiles.down);
  if (tasks > std::numeric_limits<std::int32_t>::max()) {
    refuse_argument("max_tokens", std::to_string(shape.max_tokens),
                    "lower: a rank's tasks must be countable in 32 bits");
  }
  return {rows, std::max<std::int64_t>(blocks, plan::kMinRingBlocks) * limits.block_rows};
}

void check_count(const char* name, std::size_t count, const Group& group) {
  const std::size_t local_ranks = group.local_ranks().size();
  if (count == local_ranks) return;
  refuse_argument(name, std::to_string(count) + " entries",
                  "one for each of the " + std::to_string(local_ranks) + " local ranks");
}

void check_experts(const char* name, std::size_t count, const LayerShape& shape, const Group& group) {
  const auto local_experts = static_cast<std::size_t>(experts_per_rank(shape, group.size()));
  if (count == local_experts) return;
  refuse_argument(name, std::to_string(count) + " entries",
                  std::to_string(local_experts) + ", one an expert of a rank");
}

// What both directions read of one rank.
template <class Inputs>
void check_inputs(const LayerShape& shape, const Group& group, const Inputs& inputs) {
  require_pointer(inputs.schedule, "schedule");
  check_experts("experts", inputs.experts.size(), shape, group);
  for (const ExpertWeights& expert : inputs.experts) {
    require_pointer(expert.w1, "experts.w1");
    require_pointer(expert.w3, "experts.w3");
    require_pointer(expert.w2, "experts.w2");
  }
  if (shape.shared_intermediate == 0) return;
  require_pointer(inputs.shared.w1, "shared.w1");
  require_pointer(inputs.shared.w3, "shared.w3");
  require_pointer(inputs.shared.w2, "shared.w2");
}

// One gradient of all local ranks: `wanted` by some and null with another that has use for it is an error.
bool agree(const char* name, bool is_wanted_by_some, bool is_missing_for_some) {
  if (is_wanted_by_some && is_missing_for_some) {
    refuse_argument(name, "null for some ranks or experts only", "null for all or for none");
  }
  return is_wanted_by_some;
}

}  // namespace

void refuse_argument(const std::string& name, const std::string& was, const std::string& may_be) {
  throw Error(ErrorCode::kArgument, name + ": " + was + ", must be " + may_be);
}

void require_pointer(const void* pointer, const char* name) {
  if (pointer == nullptr) refuse_argument(name, "a null pointer", "one to what the call uses");
}

void check_group(const Group* group) {
  require_pointer(group, "group");
  const std::vector<int>& ranks = group->local_ranks();
  const auto is_out_of_order = [&](int a, int b) { return a >= b; };
  const bool ascends = std::adjacent_find(ranks.begin(), ranks.end(), is_out_of_order) == ranks.end();
  if (ranks.empty() || ranks.front() < 0 || ranks.back() >= group->size() || !ascends) {
    refuse_argument("group", std::to_string(ranks.size()) + " local ranks, not all in order and in the group",
                    "one with at least one local rank, ascending, below its size of " + std::to_string(group->size()));
  }
}

std::byte* checked_base(const SymmetricMemory* memory, int rank) {
  constexpr std::uintptr_t kAlignment = 256;
  require_pointer(memory, "group.allocate");
  std::byte* base = memory->base(rank);
  require_pointer(base, "group.allocate");
  if (reinterpret_cast<std::uintptr_t>(base) % kAlignment != 0) {
    refuse_argument("group.allocate", "memory of rank " + std::to_string(rank) + " that is not aligned",
                    "aligned to " + std::to_string(kAlignment) + " bytes");
  }
  return base;
}

WorkspaceOptions resolve_options(const LayerShape& shape, int num_ranks, const WorkspaceOptions& options,
                                 const EngineLimits& limits) {
  constexpr std::int64_t kDefault = WorkspaceOptions::kDefault;
  WorkspaceOptions resolved = options;
  if (options.chunk_rows == kDefault) resolved.chunk_rows = limits.chunk_rows;
  if (options.saved_rows == kDefault) resolved.saved_rows = default_saved_rows(shape);
  if (options.blocks == kDefault) resolved.blocks = limits.blocks;
  require_at_least("chunk_rows", resolved.chunk_rows, 1);
  const WorstCase worst = worst_case(shape, num_ranks, limits);
  const std::int64_t least_ring = plan::min_ring_rows(limits.block_rows);
  resolved.chunk_rows = std::min(resolved.chunk_rows, worst.padded_rows);
  if (options.ring_rows == kDefault) {
    resolved.ring_rows = std::max(default_ring_rows(shape, resolved.chunk_rows), least_ring);
  }
  require_at_least("ring_rows", resolved.ring_rows, least_ring);
  require_at_least("saved_rows", resolved.saved_rows, 0);
  resolved.ring_rows = std::min(resolved.ring_rows, worst.padded_rows);
  resolved.saved_rows = std::min(resolved.saved_rows, worst.rows);
  if (resolved.blocks < 1 || resolved.blocks > kMostBlocks) {
    refuse_argument("blocks", std::to_string(resolved.blocks), "from 1 to " + std::to_string(kMostBlocks));
  }
  if (!(resolved.timeout_s > 0.0 && resolved.timeout_s <= kMostSeconds)) {
    refuse_argument("timeout_s", std::to_string(resolved.timeout_s), "above 0 and at most 1e7 seconds");
  }
  return resolved;
}

void check_ids(const LayerShape& shape, const Group& group, const std::vector<ExpertIds>& ids,
               const std::vector<std::int32_t*>& schedules) {
  check_count("ids", ids.size(), group);
  check_count("schedules", schedules.size(), group);
  for (const ExpertIds& rank : ids) {
    if (rank.tokens < 0 || rank.tokens > shape.max_tokens) {
      refuse_argument("tokens", std::to_string(rank.tokens),
                      "from 0 to max_tokens = " + std::to_string(shape.max_tokens));
    }
    if (rank.tokens > 0) require_pointer(rank.topk_idx, "topk_idx");
  }
  for (const std::int32_t* schedule : schedules) require_pointer(schedule, "schedules");
}

void check_forward(const LayerShape& shape, const Group& group, const std::vector<ForwardInputs>& ranks) {
  check_count("ranks", ranks.size(), group);
  for (const ForwardInputs& rank : ranks) check_inputs(shape, group, rank);
}

void check_backward(const LayerShape& shape, const Group& group, const std::vector<BackwardInputs>& ranks,
                    GradientMode mode) {
  check_count("ranks", ranks.size(), group);
  for (const BackwardInputs& rank : ranks) {
    check_inputs(shape, group, rank);
    check_experts("expert_gradients", rank.expert_gradients.size(), shape, group);
  }
  switch (mode) {
    case GradientMode::kWriteBf16:
    case GradientMode::kWriteFp32:
    case GradientMode::kAccumulateBf16:
    case GradientMode::kAccumulateFp32:
      return;
  }
  refuse_argument("mode", std::to_string(static_cast<int>(mode)), "one of GradientMode");
}

template <class Inputs>
bool are_rows_saved(const std::vector<Inputs>& ranks, const WorkspaceOptions& options) {
  if (options.saved_rows == 0) return false;
  const auto has_gate_up = [](const Inputs& rank) { return rank.saved.gate_up != nullptr; };
  const bool all = std::all_of(ranks.begin(), ranks.end(), has_gate_up);
  agree("saved.gate_up", std::any_of(ranks.begin(), ranks.end(), has_gate_up), !all);
  if (all && options.keep_x) {
    for (const Inputs& rank : ranks) require_pointer(rank.saved.x, "saved.x");
  }
  return all;
}

template bool are_rows_saved(const std::vector<ForwardInputs>&, const WorkspaceOptions&);
template bool are_rows_saved(const std::vector<BackwardInputs>&, const WorkspaceOptions&);

plan::Needs find_needs(const LayerShape& shape, const Group& group, const std::vector<BackwardInputs>& ranks,
                       const std::vector<bool>& has_use) {
  struct Wish {
    bool some = false;
    bool missing = false;
    void add(const void* gradient, bool is_used = true) {
      some = some || gradient != nullptr;
      missing = missing || (gradient == nullptr && is_used);
    }
  };
  Wish x, topk_weights, w13, w2, shared_w13, shared_w2;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    x.add(ranks[i].dx, has_use[i]);
    topk_weights.add(ranks[i].dtopk_weights, has_use[i]);
    for (const ExpertGradients& expert : ranks[i].expert_gradients) {
      w13.add(expert.w1);
      w13.add(expert.w3);
      w2.add(expert.w2);
    }
    if (shape.shared_intermediate == 0) continue;
    shared_w13.add(ranks[i].shared_gradients.w1);
    shared_w13.add(ranks[i].shared_gradients.w3);
    shared_w2.add(ranks[i].shared_gradients.w2);
  }
  const bool has_distant_peers = static_cast<int>(ranks.size()) < group.size();
  plan::Needs needs;
  needs.x = agree("dx", x.some, x.missing) || has_distant_peers;
  needs.topk_weights = agree("dtopk_weights", topk_weights.some, topk_weights.missing) || has_distant_peers;
  needs.w13 = agree("expert_gradients.w1, .w3", w13.some, w13.missing);
  needs.w2 = agree("expert_gradients.w2", w2.some, w2.missing);
  needs.shared_w13 = agree("shared_gradients.w1, .w3", shared_w13.some, shared_w13.missing);
  needs.shared_w2 = agree("shared_gradients.w2", shared_w2.some, shared_w2.missing);
  return needs;
}

}  // namespace clowder

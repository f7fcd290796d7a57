#include "engine/cpu/arguments.h"

#include <algorithm>
#include <limits>
#include <string>
#include <thread>

#include "engine/cpu/tiles.h"
#include "model/shape.h"

namespace clowder::cpu {
namespace {

constexpr std::int64_t kDefaultChunkRows = 256;
constexpr std::int32_t kMostBlocks = 4096;
constexpr double kMostSeconds = 1e7;

[[noreturn]] void refuse(const std::string& name, const std::string& was, const std::string& may_be) {
  throw Error(ErrorCode::kArgument, name + ": " + was + ", must be " + may_be);
}

void require_at_least(const char* name, std::int64_t value, std::int64_t least) {
  if (value < least) refuse(name, std::to_string(value), "at least " + std::to_string(least));
}

void require(const void* pointer, const char* name) {
  if (pointer == nullptr) refuse(name, "a null pointer", "memory");
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

WorstCase worst_case(const LayerShape& shape, int num_ranks) {
  const std::int64_t rows = num_ranks * shape.max_tokens * shape.topk;
  const std::int64_t blocks = rows / kBlockRows + experts_per_rank(shape, num_ranks);
  const std::int64_t tasks = blocks * (1 + make_tile_counts(shape).down);
  if (tasks > std::numeric_limits<std::int32_t>::max()) {
    refuse("max_tokens", std::to_string(shape.max_tokens), "lower: a rank's tasks must be countable in 32 bits");
  }
  return {rows, std::max<std::int64_t>(blocks, plan::kMinRingBlocks) * kBlockRows};
}

void check_weights(const LayerShape& shape, const std::vector<ExpertWeights>& experts, const ExpertWeights& shared,
                   const plan::ConstSchedule& schedule) {
  const auto local_experts = static_cast<std::size_t>(schedule.shape.experts_per_rank());
  if (experts.size() != local_experts) {
    refuse("experts", std::to_string(experts.size()) + " entries", std::to_string(local_experts) + " of this rank");
  }
  for (const ExpertWeights& expert : experts) {
    require(expert.w1, "experts.w1");
    require(expert.w3, "experts.w3");
    require(expert.w2, "experts.w2");
  }
  if (shape.shared_intermediate == 0) return;
  require(shared.w1, "shared.w1");
  require(shared.w3, "shared.w3");
  require(shared.w2, "shared.w2");
}

bool has_tokens(const plan::ConstSchedule& schedule) { return schedule.tokens[*schedule.rank] > 0; }

// One gradient of all local ranks: `wanted` by some and null with another that has use for it is an error.
bool agree(const char* name, bool is_wanted_by_some, bool is_missing_for_some) {
  if (is_wanted_by_some && is_missing_for_some) {
    refuse(name, "null for some ranks or experts only", "null for all or for none");
  }
  return is_wanted_by_some;
}

}  // namespace

WorkspaceOptions resolve_options(const LayerShape& shape, int num_ranks, const WorkspaceOptions& options) {
  constexpr std::int64_t kDefault = WorkspaceOptions::kDefault;
  WorkspaceOptions resolved = options;
  if (options.chunk_rows == kDefault) resolved.chunk_rows = kDefaultChunkRows;
  if (options.saved_rows == kDefault) resolved.saved_rows = default_saved_rows(shape);
  if (options.blocks == kDefault) {
    resolved.blocks = std::max(1, static_cast<std::int32_t>(std::thread::hardware_concurrency()));
  }
  require_at_least("chunk_rows", resolved.chunk_rows, 1);
  const WorstCase worst = worst_case(shape, num_ranks);
  resolved.chunk_rows = std::min(resolved.chunk_rows, worst.padded_rows);
  if (options.ring_rows == kDefault) {
    const std::int64_t wanted = default_ring_rows(shape, resolved.chunk_rows);
    resolved.ring_rows = std::max(wanted, plan::min_ring_rows(kBlockRows));
  }
  require_at_least("ring_rows", resolved.ring_rows, plan::min_ring_rows(kBlockRows));
  require_at_least("saved_rows", resolved.saved_rows, 0);
  resolved.ring_rows = std::min(resolved.ring_rows, worst.padded_rows);
  resolved.saved_rows = std::min(resolved.saved_rows, worst.rows);
  if (resolved.blocks < 1 || resolved.blocks > kMostBlocks) {
    refuse("blocks", std::to_string(resolved.blocks), "from 1 to " + std::to_string(kMostBlocks));
  }
  if (!(resolved.timeout_s > 0.0 && resolved.timeout_s <= kMostSeconds)) {
    refuse("timeout_s", std::to_string(resolved.timeout_s), "above 0 and at most 1e7 seconds");
  }
  return resolved;
}

void check_count(const char* name, std::size_t count, std::size_t num_local_ranks) {
  if (count == num_local_ranks) return;
  refuse(name, std::to_string(count) + " entries",
         "one for each of the " + std::to_string(num_local_ranks) + " local ranks");
}

void check_ids(const LayerShape& shape, std::size_t num_local_ranks, const std::vector<ExpertIds>& ids,
               const std::vector<std::int32_t*>& schedules) {
  check_count("ids", ids.size(), num_local_ranks);
  check_count("schedules", schedules.size(), num_local_ranks);
  for (const ExpertIds& rank : ids) {
    if (rank.tokens < 0 || rank.tokens > shape.max_tokens) {
      refuse("tokens", std::to_string(rank.tokens), "from 0 to max_tokens = " + std::to_string(shape.max_tokens));
    }
    if (rank.tokens > 0) require(rank.topk_idx, "topk_idx");
  }
  for (const std::int32_t* schedule : schedules) require(schedule, "schedules");
}

plan::ConstSchedule checked_schedule(const plan::ScheduleShape& shape, int rank, const std::int32_t* words) {
  require(words, "schedule");
  const plan::ConstSchedule schedule = plan::view_schedule(shape, words);
  if (*schedule.signature != shape.signature() || *schedule.rank != rank) {
    refuse("schedule", "not one of this layer and of rank " + std::to_string(rank), "what build_schedule wrote");
  }
  return schedule;
}

void check_forward(const LayerShape& shape, const ForwardInputs& inputs, const plan::ConstSchedule& schedule) {
  check_weights(shape, inputs.experts, inputs.shared, schedule);
  if (!has_tokens(schedule)) return;
  require(inputs.x, "x");
  require(inputs.topk_weights, "topk_weights");
  require(inputs.out, "out");
}

void check_backward(const LayerShape& shape, const BackwardInputs& inputs, const plan::ConstSchedule& schedule) {
  check_weights(shape, inputs.experts, inputs.shared, schedule);
  if (inputs.expert_gradients.size() != inputs.experts.size()) {
    refuse("expert_gradients", std::to_string(inputs.expert_gradients.size()) + " entries",
           std::to_string(inputs.experts.size()) + " of this rank");
  }
  if (!has_tokens(schedule)) return;
  require(inputs.x, "x");
  require(inputs.dout, "dout");
  require(inputs.topk_weights, "topk_weights");
  if (shape.shared_intermediate > 0) require(inputs.saved.shared_gate_up, "saved.shared_gate_up");
}

bool are_rows_saved(const std::vector<const SavedTensors*>& saved, std::int64_t saved_rows, bool keep_x) {
  if (saved_rows == 0) return false;
  const auto has_gate_up = [](const SavedTensors* rank) { return rank->gate_up != nullptr; };
  const bool some = std::any_of(saved.begin(), saved.end(), has_gate_up);
  const bool all = std::all_of(saved.begin(), saved.end(), has_gate_up);
  agree("saved.gate_up", some, !all);
  if (all && keep_x) {
    for (const SavedTensors* rank : saved) require(rank->x, "saved.x");
  }
  return all;
}

plan::Needs find_needs(const LayerShape& shape, const std::vector<BackwardInputs>& ranks,
                       const std::vector<plan::ConstSchedule>& schedules, bool has_distant_peers) {
  struct Wish {
    bool some = false;
    bool missing = false;
    void add(const void* gradient, bool has_use = true) {
      some = some || gradient != nullptr;
      missing = missing || (gradient == nullptr && has_use);
    }
  };
  Wish x, topk_weights, w13, w2, shared_w13, shared_w2;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    x.add(ranks[i].dx, has_tokens(schedules[i]));
    topk_weights.add(ranks[i].dtopk_weights, has_tokens(schedules[i]));
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
  plan::Needs needs;
  needs.x = agree("dx", x.some, x.missing) || has_distant_peers;
  needs.topk_weights = agree("dtopk_weights", topk_weights.some, topk_weights.missing) || has_distant_peers;
  needs.w13 = agree("expert_gradients.w1, .w3", w13.some, w13.missing);
  needs.w2 = agree("expert_gradients.w2", w2.some, w2.missing);
  needs.shared_w13 = agree("shared_gradients.w1, .w3", shared_w13.some, shared_w13.missing);
  needs.shared_w2 = agree("shared_gradients.w2", shared_w2.some, shared_w2.missing);
  return needs;
}

}  // namespace clowder::cpu

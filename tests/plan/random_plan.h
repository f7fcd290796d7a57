// What an exploration runs: a small layer group, the routes of its steps, a sequence of passes, the tuning, and the way
// in which its agents are interleaved. Everything follows from one seed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/pass.h"
#include "plan/schedule.h"

namespace clowder::plan::explore {

// One step's choices of all ranks.
struct Routing {
  std::vector<std::int32_t> tokens;                 // [R]
  std::vector<std::vector<std::int32_t>> topk_idx;  // [R], each [T_r * K]
};

// One pass that every rank of the group runs.
struct Operation {
  Pass pass = Pass::kSchedule;
  std::int32_t step = 0;   // whose routes and schedule
  std::int32_t layer = 0;  // of kForward and kBackward: what was saved, and the caller's tensors
  Needs needs;
};

// Who runs next. A step goes to a random agent with probability `random`, otherwise to the agent of highest priority.
enum class Priorities : std::int32_t {
  kRandom,      // drawn once, and again now and then for the agent that just ran
  kMathFirst,   // copy agents starve
  kCopyFirst,   // math agents starve
  kOldest,      // the first agents run
  kNewest,      // the last agents run
  kStallGroup,  // the agents of one launch run only when no others can
};
inline constexpr int kNumPriorities = static_cast<int>(Priorities::kStallGroup) + 1;

struct Interleaving {
  std::uint64_t seed = 0;
  Priorities priorities = Priorities::kRandom;
  double random = 1;
  double change = 0;              // of kRandom: probability that the agent that ran gets the lowest priority
  double slow_tasks = 0;          // probability that a task, once begun, stays in progress as long as others can run
  std::uint32_t slow_kinds = 0;   // a bit for each kind whose tasks do so always,
  bool slow_from_ticket = false;  // or do not even begin
  bool flags_at_once = false;
  double flag_pace = 0.5;  // probability that a step delivers a pending flag instead of running an agent
  std::int32_t stalled_group = 0;
};

struct PlanSpec {
  std::uint64_t seed = 0;
  ScheduleShape schedule;
  std::vector<Routing> steps;
  std::vector<Operation> program;
  std::int32_t num_layers = 1;
  RingShape forward_ring;
  RingShape backward_ring;
  std::int64_t saved_rows = 0;
  bool has_shared = false;
  bool keep_x = false;
  bool staged_inputs = true;  // otherwise peers read the caller's tensors; always so for one rank
  TileCounts tiles;
  std::vector<std::int32_t> group_begin;  // launch g runs ranks [group_begin[g], group_begin[g + 1])
  std::int32_t blocks = 1;                // of each launch: one math and one copy agent each
  Interleaving interleaving;

  std::int32_t num_groups() const { return static_cast<std::int32_t>(group_begin.size()) - 1; }
  std::int32_t max_token_blocks() const { return ceil_div(schedule.max_tokens, forward_ring.block_rows); }
  PassShape pass_shape(const Operation& operation) const;
  // A layer's x is its caller's again after forward if there is no backward, or if backward finds everything saved.
  bool is_x_free_after_forward(std::int32_t layer) const;
};

PlanSpec random_plan(std::uint64_t seed);
std::string describe(const PlanSpec& spec);

}  // namespace clowder::plan::explore

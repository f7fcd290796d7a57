// The plan of a forward pass, made on the device by one block: row blocks, chunks, and the segments of the math queue
// in the order of plan::emit_forward, with tickets for clusters. It also clears the pass's counters.
//
// plan::emit_forward is a loop over phases: gate/up of chunk q for every rank, then down of chunk q - 1 for every rank.
// How many segments and tickets a phase has follows from its chunk alone, so all phases are counted side by side, and
// two prefix sums say where each of them writes.
#pragma once

#include "engine/sm90/params.h"

namespace clowder::sm90 {

// Arrays of one rank. Sizes are worst cases, see PlanSizes.
struct PlanRank {
  plan::ConstSchedule schedule;
  plan::RankPass* pass;
  std::int32_t* block_row_begin;
  std::int32_t* block_row_count;
  std::int32_t* block_expert;
  std::int32_t* expert_block_begin;
  std::int32_t* chunk_begin;
  std::int32_t* counters[plan::kNumCounterKinds];
};

struct PlanParams {
  PlanRank own_rank;      // where there is one
  const PlanRank* ranks;  // [num_ranks] otherwise, on the device

  CLOWDER_HD const PlanRank& rank(int i) const { return num_ranks == 1 ? own_rank : ranks[i]; }

  std::int32_t num_ranks;
  std::int32_t num_experts;  // of a rank
  std::int32_t max_chunks;   // of a rank
  plan::PassShape shape;
  plan::Segment* segments;
  plan::Queue* math;
  std::int32_t* next_tickets;  // [2] of the math and the copy queue
  std::int32_t* progress;
  std::int64_t* phase_segments;  // [max phases + 1] scratch
  std::int64_t* phase_tickets;
};

// What the arrays of a launch need at most.
struct PlanSizes {
  std::int64_t blocks;        // of a rank
  std::int64_t chunks;        // of a rank
  std::int64_t token_blocks;  // of a rank
  std::int64_t phases;        // of all ranks
  std::int64_t segments;      // of all ranks
};

inline PlanSizes plan_sizes(const plan::ScheduleShape& schedule, const plan::RingShape& ring, int num_local_ranks) {
  PlanSizes sizes{};
  sizes.blocks = plan::max_blocks(schedule, ring.block_rows);
  // Two neighbouring chunks have more blocks than one may have.
  sizes.chunks = 2 * (sizes.blocks / (ring.chunk_blocks + 1)) + 2;
  sizes.token_blocks = plan::ceil_div(schedule.max_tokens, ring.block_rows);
  sizes.phases = 2 * num_local_ranks * sizes.chunks;
  const std::int64_t token_groups = plan::ceil_div(sizes.token_blocks, ring.chunk_blocks);
  // An expert's blocks make one segment a chunk that they touch.
  const std::int64_t pieces = schedule.experts_per_rank() + sizes.chunks;
  sizes.segments = num_local_ranks * (2 * pieces + 2 * token_groups);
  return sizes;
}

inline constexpr int kPlanThreads = 512;

void launch_plan(const PlanParams& params, void* stream);

}  // namespace clowder::sm90

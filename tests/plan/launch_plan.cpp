#include "launch_plan.h"

#include "plan/backward.h"
#include "plan/forward.h"

namespace clowder::plan::explore {

void SegmentList::renumber() {
  std::vector<Segment> old;
  old.swap(segments);
  num_tickets = 0;
  for (const Segment& segment : old) append(segment);
}

void BlockArrays::build(const ConstSchedule& schedule, const RingShape& ring, RankPass& rank) {
  const std::int32_t local_experts = schedule.shape.experts_per_rank();
  const std::int32_t most = schedule.num_rows() / ring.block_rows + local_experts;  // of these rows
  // Entries that a reader might take for valid ones would hide a fault.
  words.assign(static_cast<std::size_t>(most) * 5 + static_cast<std::size_t>(local_experts) + 2, INT32_MIN / 2);
  BlockTable& blocks = rank.blocks;
  blocks.block_expert = words.data();
  blocks.block_row_begin = blocks.block_expert + most;
  blocks.block_row_count = blocks.block_row_begin + most;
  rank.weight_segment_of_block = blocks.block_row_count + most;
  blocks.expert_block_begin = rank.weight_segment_of_block + most;
  blocks.chunk_begin = blocks.expert_block_begin + local_experts + 1;
  build_blocks(schedule, ring.block_rows, blocks);
  build_chunks(ring.chunk_blocks, blocks);
}

void LaunchPlan::build_layer_pass(const PassShape& shape, const std::vector<ConstSchedule>& schedules,
                                  EditShape edit_emission) {
  shape_ = shape;
  queues_.math_list.clear();
  queues_.copy_list.clear();
  ranks_.assign(schedules.size(), RankPass{});
  arrays_.resize(schedules.size());
  for (std::size_t i = 0; i < schedules.size(); ++i) {
    const ConstSchedule& schedule = schedules[i];
    ranks_[i].rank = *schedule.rank;
    ranks_[i].num_tokens = schedule.tokens[*schedule.rank];
    arrays_[i].build(schedule, shape.ring, ranks_[i]);
  }
  PassShape emitted = shape;
  if (edit_emission != nullptr) edit_emission(emitted);
  const auto num_ranks = static_cast<std::int32_t>(ranks_.size());
  if (shape.pass == Pass::kForward) {
    emit_forward(emitted, ranks_.data(), num_ranks, queues_);
  } else {
    emit_backward(emitted, ranks_.data(), num_ranks, queues_);
  }
}

void LaunchPlan::build_schedule_pass(std::int32_t first_rank, std::int32_t num_ranks) {
  shape_ = PassShape{};
  shape_.pass = Pass::kSchedule;
  queues_.math_list.clear();
  queues_.copy_list.clear();
  ranks_.assign(static_cast<std::size_t>(num_ranks), RankPass{});
  for (std::int32_t r = 0; r < num_ranks; ++r) ranks_[static_cast<std::size_t>(r)].rank = first_rank + r;
  emit_schedule(num_ranks, queues_);
}

}  // namespace clowder::plan::explore

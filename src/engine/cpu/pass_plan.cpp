#include "engine/cpu/pass_plan.h"

#include "plan/backward.h"
#include "plan/forward.h"

namespace clowder::cpu {

struct PassPlan::Sink {
  PassPlan& plan;
  void math(const plan::Segment& segment) { plan.math_.append(segment); }
  void copy(const plan::Segment& segment) { plan.copy_.append(segment); }
};

void PassPlan::Segments::append(plan::Segment segment) {
  segment.first_ticket = num_tickets;
  num_tickets += segment.num_tasks();
  list.push_back(segment);
}

PassPlan::PassPlan(const std::vector<int>& ranks) : ranks_(ranks.size()) {
  shape_.pass = plan::Pass::kSchedule;
  for (std::size_t i = 0; i < ranks.size(); ++i) ranks_[i].rank = ranks[i];
  Sink sink{*this};
  plan::emit_schedule(static_cast<std::int32_t>(ranks.size()), sink);
}

PassPlan::PassPlan(const plan::PassShape& shape, const std::vector<plan::ConstSchedule>& schedules)
    : shape_(shape), tables_(schedules.size()), ranks_(schedules.size()) {
  for (std::size_t i = 0; i < schedules.size(); ++i) build_rank(schedules[i], tables_[i], ranks_[i]);
  Sink sink{*this};
  const auto num_ranks = static_cast<std::int32_t>(ranks_.size());
  if (shape_.pass == plan::Pass::kForward) {
    plan::emit_forward(shape_, ranks_.data(), num_ranks, sink);
  } else {
    plan::emit_backward(shape_, ranks_.data(), num_ranks, sink);
  }
}

void PassPlan::build_rank(const plan::ConstSchedule& schedule, Tables& tables, plan::RankPass& rank) const {
  const std::int32_t local_experts = schedule.shape.experts_per_rank();
  std::size_t num_blocks = 0;
  for (std::int32_t e = 0; e < local_experts; ++e) {
    const std::int32_t rows = schedule.expert_row_begin[e + 1] - schedule.expert_row_begin[e];
    num_blocks += static_cast<std::size_t>(plan::ceil_div(rows, shape_.ring.block_rows));
  }
  tables.block_expert.resize(num_blocks);
  tables.block_row_begin.resize(num_blocks);
  tables.block_row_count.resize(num_blocks);
  tables.expert_block_begin.resize(static_cast<std::size_t>(local_experts) + 1);
  tables.chunk_begin.resize(num_blocks + 1);
  tables.weight_segment_of_block.resize(num_blocks);

  rank.rank = *schedule.rank;
  rank.num_tokens = schedule.tokens[rank.rank];
  rank.weight_segment_of_block = tables.weight_segment_of_block.data();
  rank.blocks.block_expert = tables.block_expert.data();
  rank.blocks.block_row_begin = tables.block_row_begin.data();
  rank.blocks.block_row_count = tables.block_row_count.data();
  rank.blocks.expert_block_begin = tables.expert_block_begin.data();
  rank.blocks.chunk_begin = tables.chunk_begin.data();
  plan::build_blocks(schedule, shape_.ring.block_rows, rank.blocks);
  plan::build_chunks(shape_.ring.chunk_blocks, rank.blocks);
}

}  // namespace clowder::cpu

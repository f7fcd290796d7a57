// The plan of one pass over the ranks of a launch, in memory of its own.
#pragma once

#include <vector>

#include "plan/pass.h"
#include "plan/schedule.h"

namespace clowder::cpu {

class PassPlan {
 public:
  // A schedule pass.
  explicit PassPlan(const std::vector<int>& ranks);
  // A forward or backward pass: one schedule for each rank of the launch.
  PassPlan(const plan::PassShape& shape, const std::vector<plan::ConstSchedule>& schedules);
  PassPlan(const PassPlan&) = delete;
  PassPlan& operator=(const PassPlan&) = delete;

  const plan::PassShape& shape() const { return shape_; }
  const std::vector<plan::RankPass>& ranks() const { return ranks_; }
  plan::Queue math() const { return math_.queue(); }
  plan::Queue copy() const { return copy_.queue(); }

 private:
  // Segments of one queue, appended in plan order.
  struct Segments {
    std::vector<plan::Segment> list;
    std::int64_t num_tickets = 0;

    void append(plan::Segment segment);
    plan::Queue queue() const { return {list.data(), static_cast<std::int64_t>(list.size()), num_tickets}; }
  };
  // The arrays behind a BlockTable.
  struct Tables {
    std::vector<std::int32_t> block_expert, block_row_begin, block_row_count;
    std::vector<std::int32_t> expert_block_begin, chunk_begin, weight_segment_of_block;
  };
  struct Sink;

  void build_rank(const plan::ConstSchedule& schedule, Tables& tables, plan::RankPass& rank) const;

  plan::PassShape shape_;
  std::vector<Tables> tables_;
  std::vector<plan::RankPass> ranks_;
  Segments math_;
  Segments copy_;
};

}  // namespace clowder::cpu

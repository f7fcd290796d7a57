// The queues of one launch with the arrays behind them, built by the plan's own functions as an engine does.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/pass.h"
#include "plan/schedule.h"

namespace clowder::plan::explore {

struct SegmentList {
  std::vector<Segment> segments;
  std::int64_t num_tickets = 0;

  void append(Segment segment) {
    segment.first_ticket = num_tickets;
    num_tickets += segment.num_tasks();
    segments.push_back(segment);
  }
  void clear() {
    segments.clear();
    num_tickets = 0;
  }
  // Numbers the tickets again after segments were moved or removed.
  void renumber();
  Queue queue() const { return Queue{segments.data(), static_cast<std::int64_t>(segments.size()), num_tickets}; }
};

// The sink of the plan's emitters.
struct Queues {
  SegmentList math_list;
  SegmentList copy_list;

  void math(const Segment& segment) { math_list.append(segment); }
  void copy(const Segment& segment) { copy_list.append(segment); }
};

// The arrays of one rank's block table.
struct BlockArrays {
  std::vector<std::int32_t> words;
  void build(const ConstSchedule& schedule, const RingShape& ring, RankPass& rank);
};

// Changes what an emitter sees of the pass's shape; for plans that are broken on purpose.
using EditShape = void (*)(PassShape&);

class LaunchPlan {
 public:
  // Schedules are those of the launch's own ranks.
  void build_layer_pass(const PassShape& shape, const std::vector<ConstSchedule>& schedules,
                        EditShape edit_emission = nullptr);
  void build_schedule_pass(std::int32_t first_rank, std::int32_t num_ranks);

  const PassShape& shape() const { return shape_; }
  const std::vector<RankPass>& ranks() const { return ranks_; }
  const RankPass& rank(std::int32_t index) const { return ranks_[static_cast<std::size_t>(index)]; }
  const Queues& queues() const { return queues_; }
  Queues& queues() { return queues_; }

 private:
  PassShape shape_;
  std::vector<RankPass> ranks_;
  std::vector<BlockArrays> arrays_;
  Queues queues_;
};

}  // namespace clowder::plan::explore

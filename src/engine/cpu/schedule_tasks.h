// The tasks of a schedule pass.
#pragma once

#include <vector>

#include "clowder/layer.h"
#include "engine/cpu/launch.h"
#include "plan/schedule.h"

namespace clowder::cpu {

class ScheduleTasks : public TaskBodies {
 public:
  // `ids` and `schedules` have an entry for each of `ranks`, those of the launch.
  ScheduleTasks(const plan::ScheduleShape& shape, const std::vector<RankMemory>& memory, const std::vector<int>& ranks,
                std::uint32_t epoch, const std::vector<ExpertIds>& ids, const std::vector<std::int32_t*>& schedules)
      : shape_(shape), memory_(memory), ranks_(ranks), buffer_(epoch % 2), ids_(ids), schedules_(schedules) {}

  void execute(const plan::Task& task, const Scratch& scratch) override;

 private:
  void stage_ids(int rank, const ExpertIds& ids) const;
  void build(int rank, std::int32_t* schedule) const;

  const plan::ScheduleShape& shape_;
  const std::vector<RankMemory>& memory_;
  const std::vector<int>& ranks_;
  std::size_t buffer_;  // of the two id buffers
  const std::vector<ExpertIds>& ids_;
  const std::vector<std::int32_t*>& schedules_;
};

}  // namespace clowder::cpu

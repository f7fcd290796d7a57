// The tasks of a forward pass on one layer.
#pragma once

#include "engine/cpu/pass_tasks.h"

namespace clowder::cpu {

class ForwardTasks : public PassTasks {
 public:
  // `inputs` has an entry for each rank of the launch.
  ForwardTasks(const LayerShape& shape, const PassPlan& plan, const std::vector<RankMemory>& memory,
               std::vector<RankView> ranks, const std::vector<ForwardInputs>& inputs)
      : PassTasks(shape, plan, memory, std::move(ranks)), inputs_(inputs) {}

  void execute(const plan::Task& task, const Scratch& scratch) override;

 private:
  const ForwardInputs& inputs(const plan::Task& task) const { return inputs_[static_cast<std::size_t>(task.rank())]; }

  void stage_inputs(const plan::Task& task) const;
  void pull(const plan::Task& task) const;
  void shared_up(const plan::Task& task, const Scratch& scratch) const;
  void up(const plan::Task& task, const Scratch& scratch) const;
  void down(const plan::Task& task, const Scratch& scratch) const;
  void out(const plan::Task& task, const Scratch& scratch) const;

  const std::vector<ForwardInputs>& inputs_;
};

}  // namespace clowder::cpu

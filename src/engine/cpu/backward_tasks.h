// The tasks of a backward pass on one layer.
#pragma once

#include "engine/cpu/pass_tasks.h"

namespace clowder::cpu {

class BackwardTasks : public PassTasks {
 public:
  // `inputs` has an entry for each rank of the launch.
  BackwardTasks(const LayerShape& shape, const PassPlan& plan, const std::vector<RankMemory>& memory,
                std::vector<RankView> ranks, const std::vector<BackwardInputs>& inputs, GradientMode mode)
      : PassTasks(shape, plan, memory, std::move(ranks)), inputs_(inputs), mode_(mode) {}

  void execute(const plan::Task& task, const Scratch& scratch) override;

 private:
  // Operands of the weight gradients, `count` consecutive rows of x, dy, [dg,du] and wh each.
  struct WeightOperands {
    const bf16* x;
    const bf16* dy;
    const bf16* gate_up_gradient;
    const bf16* weighted_hidden;
    int count;
  };
  // What a hidden-gradient tile reads and writes.
  struct HiddenRows {
    Rows<const bf16> dy;
    Rows<const bf16> gate_up;
    Rows<bf16> gate_up_gradient;
    Rows<bf16> weighted_hidden;
  };

  const BackwardInputs& inputs(const plan::Task& task) const { return inputs_[static_cast<std::size_t>(task.rank())]; }

  void stage_inputs(const plan::Task& task) const;
  void pull(const plan::Task& task) const;
  void recompute(const plan::Task& task, const Scratch& scratch) const;
  void hidden(const plan::Task& task, const Scratch& scratch) const;
  void shared_hidden(const plan::Task& task, const Scratch& scratch) const;
  void input(const plan::Task& task, const Scratch& scratch) const;
  void weight(const plan::Task& task, const Scratch& scratch) const;
  void shared_weight(const plan::Task& task, const Scratch& scratch) const;
  void input_sum(const plan::Task& task, const Scratch& scratch) const;

  Rows<bf16> recomputed_rows(const RankView& rank, const Block& block) const;
  void hidden_tile(const HiddenRows& rows, const bf16* w2, std::int64_t width, const Range& tile, const float* weights,
                   float* dw, const Scratch& scratch) const;
  // [dg,du] [W1;W3] over columns `tile` of H.
  void input_tile(const Rows<const bf16>& gate_up_gradient, const ExpertWeights& weights, std::int64_t width,
                  const Range& tile, const Scratch& scratch) const;
  void push_weight_gradients(const RankView& rank, const Block& block) const;
  void weight_gradients(const RankView& rank, std::int64_t token, float* gradients) const;

  // The rows of `block` and of those that follow it in memory, up to kWeightRun; moves `block` behind them.
  template <class Operands>
  WeightOperands operand_run(const plan::Segment& segment, const Operands& operands, std::int32_t& block) const;
  // One tile of one of an expert's gradient matrices. operands(block) gives the rows of the segment's blocks.
  template <class Operands>
  void weight_tile(const plan::Segment& segment, int tile, int tiles13, const ExpertGradients& gradients,
                   std::int64_t width, float* carry, const Operands& operands, const Scratch& scratch) const;

  const std::vector<BackwardInputs>& inputs_;
  GradientMode mode_;
};

}  // namespace clowder::cpu

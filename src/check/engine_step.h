// One step of a problem's layer: the buffers that an engine reads and writes, rank by rank, and their arguments for the
// public API.
#pragma once

#include <cstdint>
#include <vector>

#include "check/device_mirror.h"
#include "check/problem.h"
#include "check/report.h"
#include "clowder/layer.h"

namespace clowder::check {

// What the passes of a step take, all ranks' at once. `backward` is empty with forward_only.
struct StepArguments {
  std::vector<ExpertIds> ids;
  std::vector<std::int32_t*> schedules;
  std::vector<ForwardInputs> forward;
  std::vector<BackwardInputs> backward;
};

// The ranks' outputs as slices of global tensors, gradients of a shared expert one after the other. Ranks' calls may be
// made from different threads, since they share nothing that is written.
class EngineStep {
 public:
  // `workspace` decides the sizes of the schedule and of what is saved.
  EngineStep(const Problem& problem, const Workspace& workspace, bool keep_x, EngineKind engine = EngineKind::kCpu);

  // Outputs become NaN, accumulated gradients the main gradients.
  void reset();

  // Pointers are those that the engine wants.
  ExpertIds ids(int rank) const;
  std::int32_t* schedule(int rank);
  ForwardInputs forward_inputs(int rank);
  BackwardInputs backward_inputs(int rank);
  StepArguments arguments();

  // Inputs, and outputs as they stand, to where the engine reads them; results back from there. run() does both.
  void upload() { mirror_.upload(); }
  void download() { mirror_.download(); }
  // Waits for passes that return before they have ended.
  void synchronise() const { mirror_.synchronise(); }

  // Schedule, forward and backward (unless forward_only) of all ranks at once, on a workspace that drives them all.
  void run(Workspace& workspace);
  // The words of a rank's schedule as the last run left them.
  const std::int32_t* finished_schedule(int rank) const { return schedules_.data() + rank * schedule_words_; }

  // Shared experts' gradients summed in fp32 in rank order and rounded once to their type.
  LayerTensors collect() const;
  // Of all bits that the engine wrote, each rank's shared gradients included.
  std::string digest_of_everything() const;

 private:
  // Gradients of weights, bf16 or fp32 as the mode says.
  struct GradientBuffer {
    std::vector<bf16> as_bf16;
    std::vector<float> as_fp32;
  };

  void allocate_backward(bool keep_x);
  void add_to_mirror();
  bool gradients_are_bf16() const { return is_bf16(problem_.spec.gradient_mode); }
  GradientBuffer make_gradients(std::int64_t count) const;
  void reset_gradients(GradientBuffer& buffer, const std::vector<float>& main) const;
  void* gradient_at(GradientBuffer& buffer, std::int64_t offset) const;
  std::vector<float> gradient_values(const GradientBuffer& buffer) const;
  std::vector<float> sum_over_ranks(const GradientBuffer& buffer) const;
  std::vector<ExpertWeights> expert_weights(int rank) const;
  ExpertWeights shared_weights() const;
  SavedTensors saved(int rank);

  const Problem& problem_;
  int num_ranks_;
  std::int64_t schedule_words_;
  std::int64_t saved_rows_;
  std::vector<std::int64_t> first_token_;
  std::vector<std::int32_t> schedules_;
  std::vector<bf16> saved_gate_up_, saved_x_, saved_shared_gate_up_;
  std::vector<bf16> out_, dx_;
  std::vector<float> dtopk_weights_;
  GradientBuffer dw13_, dw2_, dshared_w13_, dshared_w2_;
  DeviceMirror mirror_;
};

}  // namespace clowder::check

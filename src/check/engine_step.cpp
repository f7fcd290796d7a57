#include "check/engine_step.h"

#include <algorithm>
#include <limits>

#include "check/compare.h"
#include "model/bf16.h"

namespace clowder::check {
namespace {

constexpr bf16 kNan{0x7fff};

template <class T>
T* at(std::vector<T>& tensor, std::int64_t offset) {
  return tensor.empty() ? nullptr : tensor.data() + offset;
}

std::vector<float> to_floats(const std::vector<bf16>& values) {
  std::vector<float> floats(values.size());
  std::transform(values.begin(), values.end(), floats.begin(), [](bf16 value) { return to_float(value); });
  return floats;
}

}  // namespace

EngineStep::EngineStep(const Problem& problem, const Workspace& workspace, bool keep_x, EngineKind engine)
    : problem_(problem),
      num_ranks_(problem.spec.num_ranks()),
      schedule_words_(workspace.schedule_words()),
      saved_rows_(workspace.saved_rows()),
      mirror_(engine) {
  std::int64_t first = 0;
  for (const std::int64_t tokens : problem.spec.tokens_per_rank) {
    first_token_.push_back(first);
    first += tokens;
  }
  schedules_.resize(num_ranks_ * schedule_words_);
  out_.resize(problem.x.size());
  if (!problem.spec.forward_only) allocate_backward(keep_x);
  add_to_mirror();
}

void EngineStep::allocate_backward(bool keep_x) {
  const LayerShape& shape = problem_.shape;
  const std::int64_t expert_size = shape.num_experts * shape.intermediate * shape.hidden;
  const std::int64_t shared_size = num_ranks_ * shape.shared_intermediate * shape.hidden;
  saved_gate_up_.resize(num_ranks_ * saved_rows_ * 2 * shape.intermediate);
  if (keep_x) saved_x_.resize(num_ranks_ * saved_rows_ * shape.hidden);
  saved_shared_gate_up_.resize(problem_.tokens() * 2 * shape.shared_intermediate);
  dx_.resize(problem_.x.size());
  dtopk_weights_.resize(problem_.topk_weights.size());
  dw13_ = make_gradients(2 * expert_size);
  dw2_ = make_gradients(expert_size);
  dshared_w13_ = make_gradients(2 * shared_size);
  dshared_w2_ = make_gradients(shared_size);
}

void EngineStep::add_to_mirror() {
  mirror_.add(problem_.topk_idx);
  mirror_.add(problem_.topk_weights);
  for (const std::vector<bf16>* tensor : std::initializer_list<const std::vector<bf16>*>{
           &problem_.x, &problem_.dout, &problem_.w13, &problem_.w2, &problem_.shared_w13, &problem_.shared_w2,
           &saved_gate_up_, &saved_x_, &saved_shared_gate_up_, &out_, &dx_}) {
    mirror_.add(*tensor);
  }
  mirror_.add(schedules_);
  mirror_.add(dtopk_weights_);
  for (const GradientBuffer* buffer : {&dw13_, &dw2_, &dshared_w13_, &dshared_w2_}) {
    mirror_.add(buffer->as_bf16);
    mirror_.add(buffer->as_fp32);
  }
}

void EngineStep::reset() {
  std::fill(schedules_.begin(), schedules_.end(), std::numeric_limits<std::int32_t>::min());
  for (std::vector<bf16>* tensor : {&saved_gate_up_, &saved_x_, &saved_shared_gate_up_, &out_, &dx_}) {
    std::fill(tensor->begin(), tensor->end(), kNan);
  }
  std::fill(dtopk_weights_.begin(), dtopk_weights_.end(), std::numeric_limits<float>::quiet_NaN());
  reset_gradients(dw13_, problem_.main_w13);
  reset_gradients(dw2_, problem_.main_w2);
  reset_gradients(dshared_w13_, problem_.main_shared_w13);
  reset_gradients(dshared_w2_, problem_.main_shared_w2);
}

ExpertIds EngineStep::ids(int rank) const {
  return {mirror_.of(problem_.topk_idx.data() + first_token_[rank] * problem_.shape.topk), false,
          problem_.spec.tokens_per_rank[rank]};
}

std::int32_t* EngineStep::schedule(int rank) { return mirror_.of(at(schedules_, rank * schedule_words_)); }

ForwardInputs EngineStep::forward_inputs(int rank) {
  ForwardInputs inputs;
  inputs.schedule = schedule(rank);
  inputs.x = mirror_.of(problem_.x.data() + first_token_[rank] * problem_.shape.hidden);
  inputs.topk_weights = mirror_.of(problem_.topk_weights.data() + first_token_[rank] * problem_.shape.topk);
  inputs.experts = expert_weights(rank);
  inputs.shared = shared_weights();
  inputs.out = mirror_.of(at(out_, first_token_[rank] * problem_.shape.hidden));
  inputs.saved = saved(rank);
  return inputs;
}

BackwardInputs EngineStep::backward_inputs(int rank) {
  const ForwardInputs forward = forward_inputs(rank);
  BackwardInputs inputs;
  inputs.schedule = forward.schedule;
  inputs.x = forward.x;
  inputs.dout = mirror_.of(problem_.dout.data() + first_token_[rank] * problem_.shape.hidden);
  inputs.topk_weights = forward.topk_weights;
  inputs.experts = forward.experts;
  inputs.shared = forward.shared;
  inputs.saved = forward.saved;
  inputs.dx = mirror_.of(at(dx_, first_token_[rank] * problem_.shape.hidden));
  inputs.dtopk_weights = mirror_.of(at(dtopk_weights_, first_token_[rank] * problem_.shape.topk));

  const std::int64_t size = problem_.shape.intermediate * problem_.shape.hidden;
  const std::int32_t local_experts = problem_.shape.num_experts / num_ranks_;
  for (std::int64_t e = rank * local_experts; e < (rank + 1) * local_experts; ++e) {
    inputs.expert_gradients.push_back(
        {gradient_at(dw13_, 2 * e * size), gradient_at(dw13_, (2 * e + 1) * size), gradient_at(dw2_, e * size)});
  }
  const std::int64_t shared_size = problem_.shape.shared_intermediate * problem_.shape.hidden;
  inputs.shared_gradients = {gradient_at(dshared_w13_, 2 * rank * shared_size),
                             gradient_at(dshared_w13_, (2 * rank + 1) * shared_size),
                             gradient_at(dshared_w2_, rank * shared_size)};
  return inputs;
}

StepArguments EngineStep::arguments() {
  StepArguments arguments;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    arguments.ids.push_back(ids(rank));
    arguments.schedules.push_back(schedule(rank));
    arguments.forward.push_back(forward_inputs(rank));
    if (!problem_.spec.forward_only) arguments.backward.push_back(backward_inputs(rank));
  }
  return arguments;
}

void EngineStep::run(Workspace& workspace) {
  const StepArguments passes = arguments();
  mirror_.upload();
  workspace.build_schedule(passes.ids, passes.schedules);
  workspace.forward(passes.forward);
  if (!problem_.spec.forward_only) workspace.backward(passes.backward, problem_.spec.gradient_mode);
  mirror_.download();
  workspace.check();
}

LayerTensors EngineStep::collect() const {
  LayerTensors tensors;
  tensors.out = to_floats(out_);
  tensors.dx = to_floats(dx_);
  tensors.dtopk_weights = dtopk_weights_;
  tensors.dw13 = gradient_values(dw13_);
  tensors.dw2 = gradient_values(dw2_);
  tensors.dshared_w13 = sum_over_ranks(dshared_w13_);
  tensors.dshared_w2 = sum_over_ranks(dshared_w2_);
  return tensors;
}

std::string EngineStep::digest_of_everything() const {
  std::string text = digest(std::span<const bf16>(out_)) + digest(std::span<const bf16>(dx_)) +
                     digest(std::span<const float>(dtopk_weights_));
  for (const GradientBuffer* buffer : {&dw13_, &dw2_, &dshared_w13_, &dshared_w2_}) {
    text += digest(std::span<const bf16>(buffer->as_bf16)) + digest(std::span<const float>(buffer->as_fp32));
  }
  return text;
}

EngineStep::GradientBuffer EngineStep::make_gradients(std::int64_t count) const {
  GradientBuffer buffer;
  if (gradients_are_bf16()) {
    buffer.as_bf16.resize(count);
  } else {
    buffer.as_fp32.resize(count);
  }
  return buffer;
}

// Every rank's part starts as `main`, or as NaN where nothing is accumulated.
void EngineStep::reset_gradients(GradientBuffer& buffer, const std::vector<float>& main) const {
  const auto start = [&](std::size_t i) {
    return main.empty() ? std::numeric_limits<float>::quiet_NaN() : main[i % main.size()];
  };
  for (std::size_t i = 0; i < buffer.as_bf16.size(); ++i) buffer.as_bf16[i] = to_bf16(start(i));
  for (std::size_t i = 0; i < buffer.as_fp32.size(); ++i) buffer.as_fp32[i] = start(i);
}

void* EngineStep::gradient_at(GradientBuffer& buffer, std::int64_t offset) const {
  if (gradients_are_bf16()) return mirror_.of(at(buffer.as_bf16, offset));
  return mirror_.of(at(buffer.as_fp32, offset));
}

std::vector<float> EngineStep::gradient_values(const GradientBuffer& buffer) const {
  return gradients_are_bf16() ? to_floats(buffer.as_bf16) : buffer.as_fp32;
}

std::vector<float> EngineStep::sum_over_ranks(const GradientBuffer& buffer) const {
  const std::vector<float> values = gradient_values(buffer);
  std::vector<float> sum(values.size() / static_cast<std::size_t>(num_ranks_));
  for (std::size_t i = 0; i < values.size(); ++i) {
    float& target = sum[i % sum.size()];
    target = i < sum.size() ? values[i] : target + values[i];
  }
  if (gradients_are_bf16()) {
    for (float& value : sum) value = to_float(to_bf16(value));
  }
  return sum;
}

std::vector<ExpertWeights> EngineStep::expert_weights(int rank) const {
  const std::int64_t size = problem_.shape.intermediate * problem_.shape.hidden;
  const std::int32_t local_experts = problem_.shape.num_experts / num_ranks_;
  std::vector<ExpertWeights> experts;
  for (std::int64_t e = rank * local_experts; e < (rank + 1) * local_experts; ++e) {
    experts.push_back({mirror_.of(problem_.w13.data() + 2 * e * size),
                       mirror_.of(problem_.w13.data() + (2 * e + 1) * size),
                       mirror_.of(problem_.w2.data() + e * size)});
  }
  return experts;
}

ExpertWeights EngineStep::shared_weights() const {
  const std::int64_t size = problem_.shape.shared_intermediate * problem_.shape.hidden;
  if (size == 0) return {};
  return {mirror_.of(problem_.shared_w13.data()), mirror_.of(problem_.shared_w13.data() + size),
          mirror_.of(problem_.shared_w2.data())};
}

SavedTensors EngineStep::saved(int rank) {
  const LayerShape& shape = problem_.shape;
  return {mirror_.of(at(saved_gate_up_, rank * saved_rows_ * 2 * shape.intermediate)),
          mirror_.of(at(saved_x_, rank * saved_rows_ * shape.hidden)),
          mirror_.of(at(saved_shared_gate_up_, first_token_[rank] * 2 * shape.shared_intermediate))};
}

}  // namespace clowder::check

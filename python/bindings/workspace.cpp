#include "workspace.h"

#include <numeric>

#include "model/activation/name.h"

namespace clowder::python {
namespace {

template <class T>
T* at(Address address, std::int64_t offset = 0) {
  return address == 0 ? nullptr : reinterpret_cast<T*>(address) + offset;
}

// Gradients of weights have two or four bytes an element.
void* at_element(Address address, std::int64_t offset, GradientMode mode) {
  const bool is_fp32 = mode == GradientMode::kWriteFp32 || mode == GradientMode::kAccumulateFp32;
  return address == 0 ? nullptr : reinterpret_cast<std::byte*>(address) + offset * (is_fp32 ? 4 : 2);
}

void require(Address address, const char* name) {
  if (address == 0) {
    throw Error(ErrorCode::kArgument, std::string(name) +
                                          ": a null address (a fake, meta or empty tensor); must be a "
                                          "tensor with memory");
  }
}

}  // namespace

VirtualWorkspace::VirtualWorkspace(const LayerShape& shape, int num_ranks, const WorkspaceOptions& options)
    : num_ranks_(num_ranks), workspace_(shape, make_virtual_group(num_ranks), options) {}

std::int64_t VirtualWorkspace::build_schedule(Address topk_idx, bool is_int64,
                                              const std::vector<std::int64_t>& tokens_per_rank, Address schedule,
                                              Address expert_counts) {
  const std::int64_t total = std::accumulate(tokens_per_rank.begin(), tokens_per_rank.end(), std::int64_t{0});
  if (total > 0) require(topk_idx, "topk_idx");
  require(schedule, "schedule");
  require(expert_counts, "expert_counts");
  const std::lock_guard lock(one_call_at_a_time_);

  std::vector<ExpertIds> ids;
  std::vector<std::int32_t*> schedules;
  std::int64_t first_token = 0;
  for (int r = 0; r < num_ranks_; ++r) {
    const std::int64_t offset = first_token * workspace_.shape().topk * (is_int64 ? 8 : 4);
    ids.push_back({at<const std::byte>(topk_idx, offset), is_int64, tokens_per_rank.at(r)});
    schedules.push_back(at<std::int32_t>(schedule, r * schedule_words()));
    first_token += tokens_per_rank[r];
  }
  workspace_.build_schedule(ids, schedules);

  const ScheduleSummary summary = summarise(workspace_.shape(), num_ranks_, schedules[0]);
  std::int64_t* counts = at<std::int64_t>(expert_counts);
  for (std::size_t e = 0; e < summary.expert_counts.size(); ++e) counts[e] = summary.expert_counts[e];
  return summary.skipped_ids;
}

void VirtualWorkspace::forward(const PassAddresses& pass, bool save, Address out) {
  check(pass);
  const std::lock_guard lock(one_call_at_a_time_);
  const std::int64_t hidden = workspace_.shape().hidden;
  std::vector<ForwardInputs> ranks(num_ranks_);
  std::int64_t first_token = 0;
  for (int r = 0; r < num_ranks_; ++r) {
    ForwardInputs& rank = ranks[r];
    rank.schedule = at<const std::int32_t>(pass.schedule, r * schedule_words());
    rank.x = at<const bf16>(pass.x, first_token * hidden);
    rank.topk_weights = at<const float>(pass.topk_weights, first_token * workspace_.shape().topk);
    rank.experts = rank_experts(pass.weights, r);
    rank.shared = shared_expert(pass.weights);
    rank.out = at<bf16>(out, first_token * hidden);
    if (save) rank.saved = rank_saved(pass.saved, r, first_token);
    first_token += pass.tokens_per_rank[r];
  }
  if (first_token > 0) require(out, "out");
  workspace_.forward(ranks);
}

void VirtualWorkspace::backward(const PassAddresses& pass, Address dout, const GradientAddresses& gradients,
                                GradientMode mode) {
  check(pass);
  const std::lock_guard lock(one_call_at_a_time_);
  const LayerShape& shape = workspace_.shape();
  const std::int64_t hidden = shape.hidden;
  const std::int64_t w2_size = shape.intermediate * hidden;
  const std::int64_t shared_w2_size = shape.shared_intermediate * hidden;
  const int local_experts = shape.num_experts / num_ranks_;

  std::vector<BackwardInputs> ranks(num_ranks_);
  std::int64_t first_token = 0;
  for (int r = 0; r < num_ranks_; ++r) {
    BackwardInputs& rank = ranks[r];
    rank.schedule = at<const std::int32_t>(pass.schedule, r * schedule_words());
    rank.x = at<const bf16>(pass.x, first_token * hidden);
    rank.dout = at<const bf16>(dout, first_token * hidden);
    rank.topk_weights = at<const float>(pass.topk_weights, first_token * shape.topk);
    rank.experts = rank_experts(pass.weights, r);
    rank.shared = shared_expert(pass.weights);
    rank.saved = rank_saved(pass.saved, r, first_token);
    rank.dx = at<bf16>(gradients.x, first_token * hidden);
    rank.dtopk_weights = at<float>(gradients.topk_weights, first_token * shape.topk);
    for (int e = r * local_experts; e < (r + 1) * local_experts; ++e) {
      rank.expert_gradients.push_back({at_element(gradients.w13, 2 * e * w2_size, mode),
                                       at_element(gradients.w13, (2 * e + 1) * w2_size, mode),
                                       at_element(gradients.w2, e * w2_size, mode)});
    }
    rank.shared_gradients = {at_element(gradients.shared_w13, 2 * r * shared_w2_size, mode),
                             at_element(gradients.shared_w13, (2 * r + 1) * shared_w2_size, mode),
                             at_element(gradients.shared_w2, r * shared_w2_size, mode)};
    first_token += pass.tokens_per_rank[r];
  }
  if (first_token > 0) require(dout, "dout");
  workspace_.backward(ranks, mode);
}

void VirtualWorkspace::check(const PassAddresses& pass) const {
  if (static_cast<int>(pass.tokens_per_rank.size()) != num_ranks_) {
    throw Error(ErrorCode::kArgument, "tokens_per_rank: " + std::to_string(pass.tokens_per_rank.size()) +
                                          " entries, must be one for each of " + std::to_string(num_ranks_) + " ranks");
  }
  require(pass.schedule, "schedule");
  const ScheduleSummary summary = summarise(workspace_.shape(), num_ranks_, at<const std::int32_t>(pass.schedule));
  if (summary.tokens != pass.tokens_per_rank) {
    throw Error(ErrorCode::kArgument, "tokens_per_rank: not those that the schedule was built with, must be the same");
  }
  require(pass.weights.w13, "w13");
  require(pass.weights.w2, "w2");
  if (workspace_.shape().shared_intermediate > 0) {
    require(pass.weights.shared_w13, "shared_w13");
    require(pass.weights.shared_w2, "shared_w2");
  }
  if (std::accumulate(pass.tokens_per_rank.begin(), pass.tokens_per_rank.end(), std::int64_t{0}) > 0) {
    require(pass.x, "x");
    require(pass.topk_weights, "topk_weights");
  }
}

std::vector<ExpertWeights> VirtualWorkspace::rank_experts(const WeightAddresses& weights, int rank) const {
  const std::int64_t size = workspace_.shape().intermediate * workspace_.shape().hidden;
  const int local_experts = workspace_.shape().num_experts / num_ranks_;
  std::vector<ExpertWeights> experts;
  for (int e = rank * local_experts; e < (rank + 1) * local_experts; ++e) {
    experts.push_back({at<const bf16>(weights.w13, 2 * e * size), at<const bf16>(weights.w13, (2 * e + 1) * size),
                       at<const bf16>(weights.w2, e * size)});
  }
  return experts;
}

ExpertWeights VirtualWorkspace::shared_expert(const WeightAddresses& weights) const {
  const std::int64_t size = workspace_.shape().shared_intermediate * workspace_.shape().hidden;
  return {at<const bf16>(weights.shared_w13), at<const bf16>(weights.shared_w13, size),
          at<const bf16>(weights.shared_w2)};
}

SavedTensors VirtualWorkspace::rank_saved(const SavedAddresses& saved, int rank, std::int64_t first_token) const {
  const LayerShape& shape = workspace_.shape();
  return {at<bf16>(saved.gate_up, rank * saved_rows() * 2 * shape.intermediate),
          at<bf16>(saved.x, rank * saved_rows() * shape.hidden),
          at<bf16>(saved.shared_gate_up, first_token * 2 * shape.shared_intermediate)};
}

Activation parse_activation_name(const std::string& name) { return parse_activation(name); }

}  // namespace clowder::python

#include "workspace.h"

#include <numeric>

#include "model/activation/name.h"

namespace clowder::python {
namespace {

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

template <class T>
T* at(Address address, std::int64_t offset) {
  return address == 0 ? nullptr : at<T>(address) + offset;
}

void require(Address address, const char* name) {
  if (address == 0) {
    throw Error(ErrorCode::kArgument, std::string(name) +
                                          ": a null address (a fake, meta or empty tensor); must be a "
                                          "tensor with memory");
  }
}

// `count` matrices: as many addresses, or one, or none where they need not exist.
void require(const Matrices& matrices, int count, bool must_exist, const char* name) {
  const std::size_t given = matrices.addresses.size();
  if (given == 0 && !must_exist) return;
  if (given != 1 && given != static_cast<std::size_t>(count)) {
    throw Error(ErrorCode::kArgument,
                std::string(name) + ": " + std::to_string(given) + " addresses, must be 1 or " + std::to_string(count));
  }
  if (!must_exist) return;
  for (const Address address : matrices.addresses) require(address, name);
}

ExpertGradients gradients_of(const Matrices& w1, const Matrices& w3, const Matrices& w2, std::size_t i) {
  return {at<void>(w1.of(i)), at<void>(w3.of(i)), at<void>(w2.of(i))};
}

}  // namespace

Address Matrices::of(std::size_t i) const {
  if (!exist()) return 0;
  return addresses.size() == 1 ? addresses.front() + i * static_cast<std::size_t>(stride) : addresses.at(i);
}

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
  const LayerShape& shape = workspace_.shape();
  for (const Matrices* matrices : {&gradients.w1, &gradients.w3, &gradients.w2}) {
    require(*matrices, shape.num_experts, false, "gradients");
  }
  for (const Matrices* matrices : {&gradients.shared_w1, &gradients.shared_w3, &gradients.shared_w2}) {
    require(*matrices, num_ranks_, false, "gradients");
  }
  const std::lock_guard lock(one_call_at_a_time_);
  const std::int64_t hidden = shape.hidden;
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
      rank.expert_gradients.push_back(gradients_of(gradients.w1, gradients.w3, gradients.w2, e));
    }
    rank.shared_gradients = gradients_of(gradients.shared_w1, gradients.shared_w3, gradients.shared_w2, r);
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
  const int experts = workspace_.shape().num_experts;
  require(pass.weights.w1, experts, true, "w13");
  require(pass.weights.w3, experts, true, "w13");
  require(pass.weights.w2, experts, true, "w2");
  const bool has_shared = workspace_.shape().shared_intermediate > 0;
  require(pass.weights.shared_w1, 1, has_shared, "shared_w13");
  require(pass.weights.shared_w3, 1, has_shared, "shared_w13");
  require(pass.weights.shared_w2, 1, has_shared, "shared_w2");
  if (std::accumulate(pass.tokens_per_rank.begin(), pass.tokens_per_rank.end(), std::int64_t{0}) > 0) {
    require(pass.x, "x");
    require(pass.topk_weights, "topk_weights");
  }
}

std::vector<ExpertWeights> VirtualWorkspace::rank_experts(const WeightAddresses& weights, int rank) const {
  const int local_experts = workspace_.shape().num_experts / num_ranks_;
  std::vector<ExpertWeights> experts;
  for (int e = rank * local_experts; e < (rank + 1) * local_experts; ++e) {
    experts.push_back(
        {at<const bf16>(weights.w1.of(e)), at<const bf16>(weights.w3.of(e)), at<const bf16>(weights.w2.of(e))});
  }
  return experts;
}

ExpertWeights VirtualWorkspace::shared_expert(const WeightAddresses& weights) const {
  return {at<const bf16>(weights.shared_w1.of(0)), at<const bf16>(weights.shared_w3.of(0)),
          at<const bf16>(weights.shared_w2.of(0))};
}

SavedTensors VirtualWorkspace::rank_saved(const SavedAddresses& saved, int rank, std::int64_t first_token) const {
  const LayerShape& shape = workspace_.shape();
  return {at<bf16>(saved.gate_up, rank * saved_rows() * 2 * shape.intermediate),
          at<bf16>(saved.x, rank * saved_rows() * shape.hidden),
          at<bf16>(saved.shared_gate_up, first_token * 2 * shape.shared_intermediate)};
}

Activation parse_activation_name(const std::string& name) { return parse_activation(name); }

}  // namespace clowder::python

#include "check/route_statistics.h"

#include <algorithm>
#include <cmath>

namespace clowder::check {
namespace {

struct Contribution {
  std::int32_t expert;
  double weight;
  double unmerged;
};

bool is_power_of_two(double weight) {
  int exponent = 0;
  return std::abs(std::frexp(weight, &exponent)) == 0.5;
}

// One token's contributions, in order of its slots.
std::vector<Contribution> contributions_of(const Problem& problem, std::int64_t token) {
  std::vector<Contribution> found;
  for (std::int64_t slot = token * problem.shape.topk; slot < (token + 1) * problem.shape.topk; ++slot) {
    if (!problem.has_route(slot)) continue;
    const std::int32_t expert = problem.topk_idx[slot];
    const auto weight = static_cast<double>(problem.topk_weights[slot]);
    const auto same =
        std::find_if(found.begin(), found.end(), [&](const Contribution& c) { return c.expert == expert; });
    if (same == found.end()) {
      found.push_back({expert, weight, weight * weight});
    } else {
      same->weight += weight;
      same->unmerged += weight * weight;
    }
  }
  return found;
}

class Collector {
 public:
  explicit Collector(const Problem& problem) : problem_(problem) {
    result_.experts.resize(static_cast<std::size_t>(problem.shape.num_experts));
  }

  RouteStatistics collect() {
    for (std::int64_t token = 0; token < problem_.tokens(); ++token) add_token(token);
    const double mean = active_tokens_ > 0.0 ? result_.tokens.total() / active_tokens_ : 0.0;
    result_.largest_token = mean > 0.0 ? largest_ / mean : 1.0;
    return std::move(result_);
  }

 private:
  void add_token(std::int64_t token) {
    const std::vector<Contribution> found = contributions_of(problem_, token);
    const auto routes = static_cast<double>(found.size());
    result_.routes += routes;
    if (routes > 0.0 && (result_.fewest_routes == 0.0 || routes < result_.fewest_routes))
      result_.fewest_routes = routes;

    Energy of_token;
    double unmerged = 0.0;
    for (const Contribution& contribution : found) {
      add_contribution(contribution, of_token);
      unmerged += contribution.unmerged;
    }
    const double routed = of_token.total();
    if (routed > 0.0) result_.worst_cancellation = std::max(result_.worst_cancellation, unmerged / routed);
    if (problem_.shape.shared_intermediate > 0) {
      result_.shared += 1.0;
      add_hidden(1.0, problem_.shape.shared_intermediate, of_token);
    }
    add_slots(token, of_token.total());
    if (of_token.total() == 0.0) return;
    active_tokens_ += 1.0;
    result_.tokens.add(of_token.total(), 1.0);
    largest_ = std::max(largest_, of_token.total());
    const double hidden = of_token.count();
    if (result_.fewest_hidden == 0.0 || hidden < result_.fewest_hidden) result_.fewest_hidden = hidden;
  }

  void add_contribution(const Contribution& contribution, Energy& of_token) {
    const double energy = contribution.weight * contribution.weight;
    result_.routed.add(energy, 1.0);
    result_.unmerged += contribution.unmerged;
    ExpertStatistics& expert = result_.experts[contribution.expert];
    expert.rows.add(energy, 1.0);
    expert.unmerged += contribution.unmerged;
    add_hidden(energy, problem_.shape.intermediate, of_token);
  }

  void add_hidden(double energy, std::int64_t width, Energy& of_token) {
    result_.hidden.add(energy, static_cast<double>(width));
    of_token.add(energy, static_cast<double>(width));
  }

  void add_slots(std::int64_t token, double energy) {
    std::vector<double> weights;
    for (std::int64_t slot = token * problem_.shape.topk; slot < (token + 1) * problem_.shape.topk; ++slot) {
      if (!problem_.has_route(slot)) continue;
      const auto weight = static_cast<double>(problem_.topk_weights[slot]);
      if (is_power_of_two(weight)) result_.exact_products += weight * weight;
      weights.push_back(weight);
    }
    if (problem_.shape.shared_intermediate > 0 || energy == 0.0) return;
    if (weights.size() == 1) {
      result_.copied_dx += energy;
      if (is_power_of_two(weights[0])) result_.copied_out += energy;
    } else if (weights.size() == 2) {
      const double squares = weights[0] * weights[0] + weights[1] * weights[1];
      result_.paired_dx += energy * std::abs(2.0 * weights[0] * weights[1]) / squares;
    }
  }

  const Problem& problem_;
  RouteStatistics result_;
  double active_tokens_ = 0.0;
  double largest_ = 0.0;
};

}  // namespace

RouteStatistics collect_statistics(const Problem& problem) { return Collector(problem).collect(); }

}  // namespace clowder::check

#include "check/bounds.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "check/compare.h"
#include "check/route_statistics.h"
#include "check/sensitivity.h"

namespace clowder::check {
namespace {

// The chance that one of the measures of one tensor exceeds its bound by itself.
constexpr double kChance = 1e-4;
// Rows get a ten-thousandth of it. A row's error may come from one hidden value: a product of several Gaussians, whose
// tail is heavier than the chi-squared one of its kurtosis. A row needs no bound as tight as a tensor's.
constexpr double kRowCare = 1e4;
// Widths are finite, so g and u are Gaussian only nearly, and their variance differs a little from token to token.
constexpr double kModelMargin = 1.01;
// What rounding a sum of two bf16 values counts above 1.
constexpr double kPairExcess = 1.0 / 6.0;
constexpr double kUnbounded = std::numeric_limits<double>::infinity();

double square(double x) { return x * x; }
double ratio(double a, double b, double otherwise) { return b > 0.0 ? a / b : otherwise; }

// n of a product of two independent chi-squared variables, by its variance: 1 + 2 / n = (1 + 2 / a) (1 + 2 / b).
double both(double a, double b) { return a > 0.0 && b > 0.0 ? a * b / (a + b + 2.0) : 0.0; }

// The variances of a tensor's relative error, in units of c^2: what the hidden values carry, and what is rounded later.
struct Variance {
  double hidden = 0.0;
  double later = 0.0;
};

// One part of a tensor.
struct Part {
  double hidden_values = 0.0;  // independent hidden values that it is made of
  double elements = 0.0;       // independent elements
  double parts = 1.0;          // parts like it
  double common = 1.0;         // kurtosis of what multiplies all of a hidden value in this part
};

struct Bounder {
  double fp32_error = 0.0;  // squared

  double expected(const Variance& variance) const {
    return std::sqrt(square(rounding_error()) * (variance.hidden + variance.later) + fp32_error);
  }

  double bound(const Variance& variance, const Propagation& hidden, const Part& part) const {
    const double n = both(part.hidden_values * hidden.freedom(part.common), part.elements);
    return bound(variance, ratio_factor(n, part.parts), ratio_factor(part.elements, part.parts));
  }

  // Of a part's error relative to the typical size of the parts of `group`.
  double error_bound(const Variance& variance, const Propagation& hidden, const Part& part, const Part& group) const {
    const double n = both(part.hidden_values * hidden.error_freedom(part.common), part.elements);
    // Values spread less than their errors.
    const double n_of_size = both(group.hidden_values * hidden.error_freedom(), group.elements);
    return bound(variance, error_factor(n, part.parts), error_factor(part.elements, part.parts)) *
           size_factor(n_of_size, group.parts);
  }

 private:
  double bound(const Variance& variance, double hidden_factor, double later_factor) const {
    // A variance of 0 stays 0 beside a factor without limit.
    const double of_hidden = variance.hidden > 0.0 ? variance.hidden * square(hidden_factor) : 0.0;
    const double of_later = variance.later > 0.0 ? variance.later * square(later_factor) : 0.0;
    return kModelMargin * expected({of_hidden, of_later});
  }
};

class LayerBounder {
 public:
  LayerBounder(const Problem& problem, const GradientShares& shares)
      : problem_(problem),
        shares_(shares),
        routes_(collect_statistics(problem)),
        sensitivities_(compute_sensitivities(problem.shape.activation, problem.spec.scale)) {
    const LayerShape& shape = problem.shape;
    const double terms = static_cast<double>(shape.hidden + shape.intermediate + shape.shared_intermediate +
                                             problem.tokens() * shape.topk);
    bounder_.fp32_error = terms * 0x1p-48;
  }

  LayerBounds compute() const {
    LayerBounds bounds;
    const double s = sensitivities_.hidden.variance;
    const double s_gradient = sensitivities_.hidden_gradient.variance;
    const double cancellation = ratio(routes_.unmerged, routes_.routed.total(), 1.0);
    const double total = routes_.tokens.total();
    const double routed = ratio(routes_.routed.total(), total, 1.0);

    bounds.out =
        bound_tokens(sensitivities_.hidden, {s, routed + 1.0 - ratio(routes_.copied_out, total, 0.0)}, {s, 2.0}, true);
    const double slots = routed * (2.0 * std::max(1.0, cancellation) - 1.0);
    const double sum = 1.0 - ratio(routes_.copied_dx, total, 0.0) + kPairExcess * ratio(routes_.paired_dx, total, 0.0);
    bounds.dx = bound_tokens(sensitivities_.hidden_gradient, {s_gradient, slots + sum},
                             {s_gradient, 2.0 * routes_.worst_cancellation + kPairExcess}, false);
    bounds.dtopk_weights = bound_topk_weights(s);

    const double products = std::max(1.0, cancellation) - ratio(routes_.exact_products, routes_.routed.total(), 0.0);
    bounds.dw13 = bound_w13({s_gradient, std::max(1.0, cancellation) - 1.0});
    bounds.dw2 = bound_w2({s, std::max(0.0, products) * product_rounding()});
    bounds.dshared_w13 = bound_shared_w13();
    bounds.dshared_w2 = bound_shared_w2();
    return bounds;
  }

 private:
  double hidden() const { return static_cast<double>(problem_.shape.hidden); }
  double intermediate() const { return static_cast<double>(problem_.shape.intermediate); }
  double shared_intermediate() const { return static_cast<double>(problem_.shape.shared_intermediate); }
  double num_experts() const { return static_cast<double>(problem_.shape.num_experts); }
  double tokens() const { return static_cast<double>(problem_.tokens()); }
  static double blocks(double columns) { return std::ceil(columns / kColumnBlock); }

  // Of a part's elements, `of_mean` differ in what the mean of the hidden values makes of them, m of their mean square;
  // an element's square is (1 - m) a^2 + 2 sqrt(m (1 - m)) a b + m b^2 for Gaussian a and b, of which only b is shared.
  double independent(double elements, double of_mean) const {
    const double m = sensitivities_.hidden_mean_share;
    return elements > 0.0 && of_mean > 0.0 ? 1.0 / ((1.0 - m * m) / elements + m * m / of_mean) : elements;
  }

  // What the rounding of w h counts: a clamp that holds h leaves mantissas to the weights alone.
  double product_rounding() const { return 1.0 + sensitivities_.partly_held_share * (worst_rounding() - 1.0); }

  // Where h is held, all of a row's products w h err alike: with the kurtosis of a uniform error, 9/5, `rows` of them
  // vary like a chi-squared variable with 2 rows / (9/5 - 1) degrees of freedom.
  double independent_products(double rows, double elements) const {
    const double held = sensitivities_.held_share;
    return held > 0.0 ? both(elements, 2.5 * rows / (held * held)) : elements;
  }

  // out and dx, [T, H]. `row` holds the variances of the worst token.
  TensorBounds bound_tokens(const Propagation& propagation, const Variance& variance, const Variance& row,
                            bool is_out) const {
    const double count = routes_.hidden.count();
    // All tokens of an expert share what the mean of the hidden values makes of its W2; dx has random signs.
    const double even_tokens = routes_.tokens.count();
    const double of_mean = is_out ? all_experts() : even_tokens;
    const Part tensor{count, independent(even_tokens * hidden(), of_mean * hidden()), 1.0};
    const Part columns{count, independent(even_tokens * kColumnBlock, of_mean * kColumnBlock), blocks(hidden())};
    const Part one_row{routes_.fewest_hidden, hidden(), kRowCare * tokens()};
    TensorBounds bounds;
    bounds.expected = bounder_.expected(variance);
    bounds.rel = bounder_.bound(variance, propagation, tensor);
    bounds.column_block = bounder_.bound(variance, propagation, columns);
    bounds.row = bounder_.bound(row, propagation, one_row);
    bounds.row_error = std::sqrt(routes_.largest_token) * bounder_.error_bound(row, propagation, one_row, tensor);
    bounds.expert = bounds.rel;
    return bounds;
  }

  TensorBounds bound_topk_weights(double s) const {
    const Variance variance{s, 0.0};
    const Propagation& propagation = sensitivities_.hidden;
    const double elements = independent(routes_.routes, averaging_experts() * hidden());
    const Part tensor{routes_.routes * intermediate(), elements, 1.0};
    const Part one_row{routes_.fewest_routes * intermediate(), routes_.fewest_routes, kRowCare * tokens()};
    TensorBounds bounds;
    bounds.expected = bounder_.expected(variance);
    bounds.rel = bounder_.bound(variance, propagation, tensor);
    bounds.column_block = bounds.rel;  // K <= 16: one block
    bounds.row = bounder_.bound(variance, propagation, one_row);
    const double largest = static_cast<double>(problem_.shape.topk) * tokens() / std::max(1.0, routes_.routes);
    bounds.row_error = std::sqrt(std::max(1.0, largest)) * bounder_.error_bound(variance, propagation, one_row, tensor);
    bounds.expert = bounds.rel;
    return bounds;
  }

  // The rows of the expert that has the fewest, and how much its rows cancel at the worst.
  struct SmallestExpert {
    double rows = 0.0;
    double cancellation = 1.0;
  };

  SmallestExpert smallest_expert() const {
    SmallestExpert smallest;
    for (const ExpertStatistics& expert : routes_.experts) {
      const double rows = expert.rows.count();
      if (rows == 0.0) continue;
      if (smallest.rows == 0.0 || rows < smallest.rows) smallest.rows = rows;
      smallest.cancellation = std::max(smallest.cancellation, expert.unmerged / expert.rows.total());
    }
    return smallest;
  }

  // Experts, as far as a sum over all of them averages.
  double averaging_experts() const {
    Energy experts;
    for (const ExpertStatistics& expert : routes_.experts) experts.add(expert.rows.total(), 1.0);
    return experts.count();
  }

  // The shared expert among them.
  double all_experts() const {
    Energy experts;
    for (const ExpertStatistics& expert : routes_.experts) experts.add(expert.rows.total(), 1.0);
    experts.add(routes_.shared, 1.0);
    return experts.count();
  }

  double rounds_gradient() const { return is_bf16(problem_.spec.gradient_mode) ? 1.0 : 0.0; }

  // What becomes of a gradient's variances when it is written, or added to what is there.
  Variance stored(const Variance& variance, double share, double roundings) const {
    return {share * variance.hidden, share * variance.later + roundings};
  }

  struct WeightParts {
    Part tensor, columns, row, expert;
  };

  TensorBounds bound_weights(const Propagation& propagation, const Variance& whole, const Variance& expert,
                             const Variance& row, const WeightParts& parts) const {
    TensorBounds bounds;
    bounds.expected = bounder_.expected(whole);
    bounds.rel = bounder_.bound(whole, propagation, parts.tensor);
    bounds.column_block = bounder_.bound(whole, propagation, parts.columns);
    bounds.expert = bounder_.bound(expert, propagation, parts.expert);
    bounds.row = bounder_.bound(row, propagation, parts.row);
    bounds.row_error = bounder_.error_bound(row, propagation, parts.row, parts.expert);
    return bounds;
  }

  // A row belongs to W1 or to W3, whose gradients may differ in size; what bounds the worse of them holds for both.
  void bound_rows_w13(double later, double rounds, const WeightParts& parts, TensorBounds& bounds) const {
    bounds.row = bounds.row_error = 0.0;
    const double gate_share = sensitivities_.gate_share;
    for (const auto& [propagation, share] :
         {std::pair(&sensitivities_.gate, gate_share), std::pair(&sensitivities_.up, 1.0 - gate_share)}) {
      const Variance variance = stored({propagation->variance, later}, 1.0, rounds);
      // Relative to the root mean square over the rows of both.
      const double size = std::sqrt(2.0 * share);
      bounds.row = std::max(bounds.row, bounder_.bound(variance, *propagation, parts.row));
      bounds.row_error =
          std::max(bounds.row_error, size * bounder_.error_bound(variance, *propagation, parts.row, parts.expert));
    }
  }

  TensorBounds bound_w13(const Variance& variance) const {
    const double rows = routes_.routed.count();
    const double experts = averaging_experts();
    const SmallestExpert smallest = smallest_expert();
    const double outputs = 2.0 * intermediate();
    const WeightParts parts{
        {rows * intermediate(), experts * outputs * hidden(), 1.0},
        {rows * intermediate(), experts * outputs * kColumnBlock, blocks(hidden())},
        {smallest.rows, hidden(), kRowCare * num_experts() * outputs},
        {smallest.rows * intermediate(), outputs * hidden(), num_experts()},
    };
    const double rounds = rounds_gradient();
    const double later = smallest.cancellation - 1.0;
    const Variance expert = stored({variance.hidden, later}, 1.0, rounds);
    TensorBounds bounds =
        bound_weights(sensitivities_.hidden_gradient, stored(variance, shares_.w13, rounds), expert, expert, parts);
    bound_rows_w13(later, rounds, parts, bounds);
    return bounds;
  }

  TensorBounds bound_w2(const Variance& variance) const {
    const double rows = routes_.routed.count();
    const double experts = averaging_experts();
    const SmallestExpert smallest = smallest_expert();
    // A row's columns share what the mean of the hidden values makes of it.
    const auto products_of = [&](double rows_of_part, double elements, double of_mean) {
      return independent_products(rows_of_part, independent(elements, of_mean));
    };
    const WeightParts parts{
        {rows * intermediate(), products_of(rows, experts * hidden() * intermediate(), experts * hidden()), 1.0},
        {rows * kColumnBlock, products_of(rows, experts * hidden() * kColumnBlock, experts * hidden()),
         blocks(intermediate())},
        // One column of dy multiplies all of a row.
        {smallest.rows * intermediate(), products_of(smallest.rows, intermediate(), 1.0),
         kRowCare * num_experts() * hidden(), kGaussianKurtosis},
        {smallest.rows * intermediate(), products_of(smallest.rows, hidden() * intermediate(), hidden()),
         num_experts()},
    };
    const double rounds = rounds_gradient();
    const Variance expert{variance.hidden, smallest.cancellation * product_rounding()};
    return bound_weights(sensitivities_.hidden, stored(variance, shares_.w2, rounds), stored(expert, 1.0, rounds),
                         stored(expert, 1.0, rounds), parts);
  }

  // Ranks' gradients are rounded, and their sum once more.
  double shared_roundings() const {
    const int ranks = problem_.spec.num_ranks();
    return rounds_gradient() * (ranks == 1 ? 1.0 : ranks == 2 ? 2.0 + kPairExcess : 2.0);
  }

  TensorBounds bound_shared_w13() const {
    const double outputs = 2.0 * shared_intermediate();
    const double values = tokens() * shared_intermediate();
    const WeightParts parts{
        {values, outputs * hidden(), 1.0},
        {values, outputs * kColumnBlock, blocks(hidden())},
        {tokens(), hidden(), kRowCare * outputs},
        {values, outputs * hidden(), 1.0},
    };
    const double rounds = shared_roundings();
    const Variance variance = stored({sensitivities_.hidden_gradient.variance, 0.0}, shares_.shared_w13, rounds);
    TensorBounds bounds = bound_weights(sensitivities_.hidden_gradient, variance, variance, variance, parts);
    bound_rows_w13(0.0, rounds, parts, bounds);
    return bounds;
  }

  TensorBounds bound_shared_w2() const {
    const double values = tokens() * shared_intermediate();
    const double elements = independent(hidden() * shared_intermediate(), hidden());
    const WeightParts parts{
        {values, elements, 1.0},
        {tokens() * kColumnBlock, independent(hidden() * kColumnBlock, hidden()), blocks(shared_intermediate())},
        {values, independent(shared_intermediate(), 1.0), kRowCare * hidden(), kGaussianKurtosis},
        {values, elements, 1.0},
    };
    const double rounds = shared_roundings();
    const Variance variance = stored({sensitivities_.hidden.variance, 0.0}, shares_.shared_w2, rounds);
    return bound_weights(sensitivities_.hidden, variance, variance,
                         stored({sensitivities_.hidden.variance, 0.0}, 1.0, rounds), parts);
  }

  const Problem& problem_;
  GradientShares shares_;
  RouteStatistics routes_;
  Sensitivities sensitivities_;
  Bounder bounder_;
};

// The q between `near`, on the side of 1, and `far` for which q - 1 - ln q is `target`.
double solve(double target, double near, double far) {
  for (int step = 0; step < 200; ++step) {
    const double middle = 0.5 * (near + far);
    (middle - 1.0 - std::log(middle) < target ? near : far) = middle;
  }
  return far;
}

}  // namespace

double rounding_error() { return 0x1p-7 * std::sqrt(1.0 / worst_rounding() / 12.0); }

double worst_rounding() { return 8.0 * std::log(2.0) / 3.0; }

double ratio_factor(double n, double parts) {
  if (n <= 0.0) return kUnbounded;
  const double exponent = std::log(std::max(1.0, parts) / kChance) / n;
  // acosh(e^t) is t + ln 2 where e^t is too large to square.
  const double logarithm = exponent > 30.0 ? exponent + std::log(2.0) : std::acosh(std::exp(exponent));
  return std::exp(logarithm);
}

double error_factor(double n, double parts) {
  if (n <= 0.0) return kUnbounded;
  const double target = 2.0 * std::log(std::max(1.0, parts) / kChance) / n;
  double high = 2.0;
  while (high - 1.0 - std::log(high) < target) high *= 2.0;
  return std::sqrt(solve(target, 0.5 * high, high));
}

double size_factor(double n, double parts) {
  if (n <= 0.0) return 1.0;
  const double target = 2.0 * std::log(std::max(1.0, parts) / kChance) / n;
  double low = 0.5;
  while (low - 1.0 - std::log(low) < target && low > 1e-300) low *= 0.5;
  return 1.0 / std::sqrt(solve(target, 2.0 * low, low));
}

LayerBounds compute_bounds(const Problem& problem, const GradientShares& shares) {
  return LayerBounder(problem, shares).compute();
}

}  // namespace clowder::check

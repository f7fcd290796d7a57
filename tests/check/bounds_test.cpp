#include "check/bounds.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "check/report.h"
#include "check/sensitivity.h"
#include "emulation.h"
#include "model/all_activations.h"
#include "model/bf16.h"

namespace clowder::check {
namespace {

constexpr int kThreads = 2;

double rounded(double value) { return static_cast<double>(to_float(to_bf16(static_cast<float>(value)))); }

// A problem, its reference, and what an engine makes of it.
struct Case {
  Problem problem;
  ReferenceResults reference;
  LayerTensors tensors;

  explicit Case(const ProblemSpec& spec) : problem(make_problem(spec, kThreads)) {
    reference = compute_reference(problem, kThreads);
    tensors = emulate_engine(problem, kThreads);
  }

  std::vector<TensorReport> reports(const LayerTensors& actual) const {
    ReferenceResults copy = reference;
    return judge(problem, actual, copy);
  }
  std::vector<TensorReport> reports() const { return reports(tensors); }
};

ProblemSpec spec_of(std::int64_t tokens) {
  ProblemSpec spec;
  spec.tokens_per_rank = {tokens};
  return spec;
}

TEST(RoundingError, IsWhatRoundingGaussiansGivesAtEveryScale) {
  std::mt19937 random(7);
  std::normal_distribution<double> normal;
  for (const double scale : {1.0, 1.2, 1.41, 1.7, 1e-6, 3e7}) {
    double error = 0.0;
    double size = 0.0;
    for (int i = 0; i < 400000; ++i) {
      const double value = static_cast<double>(static_cast<float>(scale * normal(random)));
      error += std::pow(rounded(value) - value, 2);
      size += value * value;
    }
    EXPECT_NEAR(std::sqrt(error / size), rounding_error(), 0.006 * rounding_error()) << scale;
  }
  EXPECT_NEAR(rounding_error(), 1.659e-3, 1e-6);
}

struct Ratio {
  double size = 0.0;
  double error = 0.0;
  double fourth = 0.0;

  void add(double exact, double difference) {
    size += exact * exact;
    fourth += std::pow(exact, 4);
    error += difference * difference;
  }
  double variance() const { return error / size / (rounding_error() * rounding_error()); }
};

// By Monte Carlo: the quadrature and the second derivatives are right.
TEST(Sensitivities, AreWhatRoundingShows) {
  constexpr int kSamples = 200000;
  std::mt19937 random(8);
  std::normal_distribution<double> normal;
  for (const Activation& kind : all_activations()) {
    for (const double scale : {0.05, 0.3, 1.0, 4.0, 16.0, 64.0}) {
      Ratio hidden, gradient, gate, up;
      double sum = 0.0;
      with_activation(kind, [&](const auto& activation) {
        for (int i = 0; i < kSamples; ++i) {
          const double g = scale * normal(random);
          const double u = scale * normal(random);
          const auto exact = activation.gradient_on(activation.piece(rounded(g), rounded(u)), g, u);
          const auto actual = activation.gradient(rounded(g), rounded(u));
          sum += exact.value;
          hidden.add(exact.value, rounded(actual.value) - exact.value);
          const double dh = normal(random);
          const double gate_error = rounded(dh * actual.dg) - dh * exact.dg;
          const double up_error = rounded(dh * actual.du) - dh * exact.du;
          gate.add(dh * exact.dg, gate_error);
          up.add(dh * exact.du, up_error);
          gradient.add(dh * exact.dg, gate_error);
          gradient.add(dh * exact.du, up_error);
        }
      });
      const Sensitivities expected = compute_sensitivities(kind, scale);
      const auto expect_near = [&](const char* name, const Ratio& found, const Propagation& propagation) {
        const double deviation = std::sqrt(propagation.ratio_spread / kSamples);
        const double ratio = found.variance() / propagation.variance;
        const double tolerance = 0.02 + 5.0 * deviation;
        // Where clamps hold g or u, what is expected is the worst.
        const double lowest = expected.partly_held_share > 0.01 ? 1.0 / worst_rounding() : 1.0;
        EXPECT_LE(ratio, 1.0 + tolerance) << name << " of " << to_string(kind) << " at " << scale;
        EXPECT_GE(ratio, lowest - tolerance) << name << " of " << to_string(kind) << " at " << scale;
      };
      expect_near("h", hidden, expected.hidden);
      expect_near("dg and du", gradient, expected.hidden_gradient);
      expect_near("dg", gate, expected.gate);
      expect_near("du", up, expected.up);
      const double deviation = std::sqrt((gate.fourth + up.fourth) / gradient.size / gradient.size);
      EXPECT_NEAR(gate.size / gradient.size, expected.gate_share, 0.01 + 5.0 * deviation);
      EXPECT_NEAR(sum * sum / kSamples / hidden.size, expected.hidden_mean_share, 0.01);
    }
  }
}

TEST(Factors, AreThoseOfTheirFormulas) {
  for (const double n : {0.1, 1.0, 7.0, 500.0, 1e6}) {
    for (const double parts : {1.0, 1000.0}) {
      const double chance = std::pow(std::cosh(std::log(ratio_factor(n, parts))), -n);
      if (std::isfinite(chance) && chance > 0.0) {
        EXPECT_NEAR(chance * parts, 1e-4, 1e-8) << n;
      }
      const double q = std::pow(error_factor(n, parts), 2);
      EXPECT_NEAR(n / 2 * (q - 1 - std::log(q)), std::log(parts / 1e-4), 1e-6) << n;
      EXPECT_LT(error_factor(n, parts), ratio_factor(n, parts));
      const double low = std::pow(size_factor(n, parts), -2);
      EXPECT_LT(low, 1.0);
      EXPECT_NEAR(n / 2 * (low - 1 - std::log(low)), std::log(parts / 1e-4), 1e-6) << n;
    }
  }
  EXPECT_TRUE(std::isinf(ratio_factor(0.0, 1.0)));
}

// Chernoff's bound holds, and is no more than a few times too careful, for sums of independent Gaussians.
TEST(Factors, AreExceededAsRarelyAsTheySay) {
  std::mt19937 random(9);
  std::normal_distribution<double> normal;
  for (const int n : {4, 40}) {
    // ratio_factor's formula for a chance of one in 200.
    const double factor = std::exp(std::acosh(std::pow(200.0, 1.0 / n)));
    int above = 0;
    for (int trial = 0; trial < 40000; ++trial) {
      double error = 0.0, size = 0.0;
      for (int i = 0; i < n; ++i) {
        error += std::pow(normal(random), 2);
        size += std::pow(normal(random), 2);
      }
      if (std::sqrt(error / size) > factor) ++above;
    }
    EXPECT_LE(above, 200) << n;
    EXPECT_GE(above, 10) << n;
  }
}

TEST(Bounds, ExpectedErrorsOfSwigluAreKnown) {
  ProblemSpec spec = spec_of(1021);
  const auto bounds = [&] { return compute_bounds(make_problem(spec, kThreads), {}); };
  const LayerBounds bf16_bounds = bounds();
  EXPECT_NEAR(bf16_bounds.out.expected, 3.9e-3, 0.05e-3);
  EXPECT_NEAR(bf16_bounds.dx.expected, 3.5e-3, 0.05e-3);
  EXPECT_NEAR(bf16_bounds.dtopk_weights.expected, 3.1e-3, 0.05e-3);
  EXPECT_NEAR(bf16_bounds.dw13.expected, 3.0e-3, 0.05e-3);
  EXPECT_NEAR(bf16_bounds.dw2.expected, 3.9e-3, 0.05e-3);
  spec.gradient_mode = GradientMode::kWriteFp32;
  EXPECT_NEAR(bounds().dw13.expected, 2.5e-3, 0.05e-3);
}

TEST(Bounds, AreTightForManyElements) {
  for (const std::int32_t topk : {1, 2, 6}) {
    ProblemSpec spec = spec_of(512);
    spec.topk = topk;
    const LayerBounds bounds = compute_bounds(make_problem(spec, kThreads), {});
    for (const TensorBounds* bound : {&bounds.out, &bounds.dx, &bounds.dw13, &bounds.dw2}) {
      EXPECT_LE(bound->rel, 1.06 * bound->expected);
      EXPECT_LE(bound->column_block, 1.5 * bound->rel);
    }
  }
}

struct Named {
  const char* name;
  std::function<void(ProblemSpec&)> change;
};

std::ostream& operator<<(std::ostream& stream, const Named& named) { return stream << named.name; }

class BoundsHold : public testing::TestWithParam<Named> {};

// An engine that rounds as DESIGN says is within every bound; and where a tensor has enough values, its error is
// between 0.8 and 1.0 of the bound, unless clamps hold many of them and the bound is for the worst.
void expect_bounds_hold(const Named& named, std::uint64_t first_seed, std::uint64_t seeds) {
  for (std::uint64_t seed = first_seed; seed < first_seed + seeds; ++seed) {
    ProblemSpec spec = spec_of(512);
    spec.seed = seed;
    named.change(spec);
    const Case checked(spec);
    for (const TensorReport& tensor : checked.reports()) {
      const Comparison& errors = tensor.errors;
      const TensorBounds& bounds = tensor.bounds;
      EXPECT_TRUE(tensor.ok()) << tensor.name << " seed " << seed << ": " << errors.rel / bounds.rel
                               << " of the bound, " << errors.rel_worst_column_block / bounds.column_block
                               << " by columns, " << errors.rel_worst_row / bounds.row << " and "
                               << errors.worst_row_error / bounds.row_error << " by rows, "
                               << errors.rel_worst_expert / bounds.expert << " by experts";
      const bool has_many = checked.problem.tokens() * spec.hidden >= 100000 && tensor.name != "dtopk_weights" &&
                            compute_sensitivities(spec.activation, spec.scale).partly_held_share < 0.1;
      if (has_many && errors.rel > 0.0) {
        EXPECT_GE(errors.rel, 0.8 * bounds.rel) << tensor.name;
      }
    }
  }
}

TEST_P(BoundsHold, ForAnEngineThatRoundsAsItShould) { expect_bounds_hold(GetParam(), 0, 2); }

class LongBoundsHold : public BoundsHold {};

TEST_P(LongBoundsHold, OverManySeeds) { expect_bounds_hold(GetParam(), 100, 20); }

const Named kCases[] = {
    {"plain", [](ProblemSpec&) {}},
    {"fp32", [](ProblemSpec& s) { s.gradient_mode = GradientMode::kWriteFp32; }},
    {"accumulate_fp32", [](ProblemSpec& s) { s.gradient_mode = GradientMode::kAccumulateFp32; }},
    {"accumulate_bf16",
     [](ProblemSpec& s) {
       s.gradient_mode = GradientMode::kAccumulateBf16;
       s.shared_intermediate = 64;
     }},
    {"accumulate_on_three_ranks",
     [](ProblemSpec& s) {
       s.tokens_per_rank = {200, 0, 312, 1};
       s.gradient_mode = GradientMode::kAccumulateBf16;
       s.shared_intermediate = 160;
     }},
    {"shared", [](ProblemSpec& s) { s.shared_intermediate = 320; }},
    {"shared_on_two_ranks",
     [](ProblemSpec& s) {
       s.tokens_per_rank = {300, 212};
       s.shared_intermediate = 128;
     }},
    {"zero_weights", [](ProblemSpec& s) { s.topk_weights = TopkWeights::kZeros; }},
    {"zero_weights_and_shared",
     [](ProblemSpec& s) {
       s.topk_weights = TopkWeights::kZeros;
       s.shared_intermediate = 128;
     }},
    {"signed_weights", [](ProblemSpec& s) { s.topk_weights = TopkWeights::kSigned; }},
    {"unnormalised", [](ProblemSpec& s) { s.topk_weights = TopkWeights::kUnnormalised; }},
    {"clamp",
     [](ProblemSpec& s) {
       s.activation = {ActivationKind::kSwigluClamp, 7.0f};
       s.scale = 4.0;
     }},
    {"clamp_held_everywhere",
     [](ProblemSpec& s) {
       s.activation = {ActivationKind::kSwigluClamp, 1.01f};
       s.scale = 64.0;
     }},
    {"geglu", [](ProblemSpec& s) { s.activation.kind = ActivationKind::kGeglu; }},
    {"geglu_of_large_values",
     [](ProblemSpec& s) {
       s.activation.kind = ActivationKind::kGeglu;
       s.scale = 8.0;
       s.shared_intermediate = 96;
     }},
    {"reglu", [](ProblemSpec& s) { s.activation.kind = ActivationKind::kReglu; }},
    {"reglu_of_one_slot",
     [](ProblemSpec& s) {
       s.activation.kind = ActivationKind::kReglu;
       s.topk = 1;
       s.scale = 0.01;
     }},
    {"gpt_oss", [](ProblemSpec& s) { s.activation.kind = ActivationKind::kGptOss; }},
    {"gpt_oss_of_one_expert",
     [](ProblemSpec& s) {
       s.activation.kind = ActivationKind::kGptOss;
       s.routing = parse_routing("one:1");
       s.intermediate = 256;
       s.shared_intermediate = 64;
     }},
    {"gpt_oss_of_small_values",
     [](ProblemSpec& s) {
       s.activation.kind = ActivationKind::kGptOss;
       s.scale = 0.1;
       s.num_experts = 2;
     }},
    {"gpt_oss_of_large_values",
     [](ProblemSpec& s) {
       s.activation.kind = ActivationKind::kGptOss;
       s.scale = 16.0;
       s.gradient_mode = GradientMode::kWriteFp32;
     }},
    {"tiny_scale", [](ProblemSpec& s) { s.scale = 0.01; }},
    {"one_slot", [](ProblemSpec& s) { s.topk = 1; }},
    {"eight_slots", [](ProblemSpec& s) { s.topk = 8; }},
    {"repeated_experts",
     [](ProblemSpec& s) {
       s.topk = 6;
       s.num_experts = 4;
       s.topk_weights = TopkWeights::kSigned;
     }},
    {"hot", [](ProblemSpec& s) { s.routing = parse_routing("hot:0.9"); }},
    {"one_expert", [](ProblemSpec& s) { s.routing = parse_routing("one:3"); }},
    {"zipf_dropped_and_bad",
     [](ProblemSpec& s) {
       s.routing = parse_routing("zipf:1.5");
       s.num_experts = 32;
       s.drop = 0.4;
       s.bad_ids = 9;
     }},
    {"no_routes", [](ProblemSpec& s) { s.drop = 1.0; }},
    {"no_tokens",
     [](ProblemSpec& s) {
       s.tokens_per_rank = {0, 0};
     }},
    {"one_token", [](ProblemSpec& s) { s.tokens_per_rank = {1}; }},
    {"few_tokens",
     [](ProblemSpec& s) {
       s.tokens_per_rank = {17, 16, 7, 1};
     }},
    {"smallest_widths",
     [](ProblemSpec& s) {
       s.tokens_per_rank = {40};
       s.hidden = s.intermediate = s.shared_intermediate = 32;
     }},
    {"many_experts",
     [](ProblemSpec& s) {
       s.tokens_per_rank = {1024};
       s.num_experts = 128;
       s.topk = 6;
       s.hidden = 64;
       s.intermediate = 32;
     }},
    {"forward_only", [](ProblemSpec& s) { s.forward_only = true; }},
};

INSTANTIATE_TEST_SUITE_P(Emulated, BoundsHold, testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.name); });

INSTANTIATE_TEST_SUITE_P(Emulated, LongBoundsHold, testing::ValuesIn(kCases),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(TensorReport, AsksForEveryMeasure) {
  TensorReport report;
  report.has_experts = true;
  report.errors = {1.0, 1.0, 1.0, 1.0, 1.0};
  report.bounds = {1.0, 1.0, 1.0, 1.0, 1.0, 1.0};
  EXPECT_TRUE(report.ok());
  for (double Comparison::*measure : {&Comparison::rel, &Comparison::rel_worst_column_block, &Comparison::rel_worst_row,
                                      &Comparison::rel_worst_expert, &Comparison::worst_row_error}) {
    TensorReport wrong = report;
    wrong.errors.*measure = 1.01;
    EXPECT_FALSE(wrong.ok());
  }
  report.has_experts = false;
  report.errors.rel_worst_expert = 2.0;
  EXPECT_TRUE(report.ok());
  // Nothing without limit is fine, even where the bound has none.
  report.errors.rel_worst_row = report.bounds.row = std::numeric_limits<double>::infinity();
  EXPECT_FALSE(report.ok());
}

// A tensor by the name that reports give it.
std::vector<float>& tensor_of(LayerTensors& tensors, const std::string& name) {
  if (name == "out") return tensors.out;
  if (name == "dx") return tensors.dx;
  if (name == "dtopk_weights") return tensors.dtopk_weights;
  if (name == "dw13") return tensors.dw13;
  if (name == "dw2") return tensors.dw2;
  return name == "dshared_w13" ? tensors.dshared_w13 : tensors.dshared_w2;
}

struct Layout {
  std::string name;
  std::int64_t rows, columns, experts;
};

std::vector<Layout> layouts(const Problem& problem) {
  const LayerShape& shape = problem.shape;
  return {{"out", problem.tokens(), shape.hidden, 1},
          {"dx", problem.tokens(), shape.hidden, 1},
          {"dtopk_weights", problem.tokens(), shape.topk, 1},
          {"dw13", shape.num_experts * 2 * shape.intermediate, shape.hidden, shape.num_experts},
          {"dw2", shape.num_experts * shape.hidden, shape.intermediate, shape.num_experts},
          {"dshared_w13", 2 * shape.shared_intermediate, shape.hidden, 1},
          {"dshared_w2", shape.hidden, shape.shared_intermediate, 1}};
}

// What a mistake does to a tensor.
using Mistake = std::function<void(std::vector<float>&, const Layout&)>;

// An engine's fp32 sums may put a g or u on the other side of a corner than the exact ones. Either is right where they
// may, and neither is anywhere else.
TEST(OpenChoices, BothSidesOfACornerAreRightAndNothingElse) {
  ProblemSpec spec = spec_of(512);
  spec.activation.kind = ActivationKind::kReglu;
  spec.shared_intermediate = 96;
  const Case checked(spec);
  const auto& choices = checked.reference.choices;
  ASSERT_FALSE(choices.empty());
  const std::int64_t hidden = spec.hidden;
  const auto with_other_side = [&](double times, std::int64_t outputs_further) {
    LayerTensors tensors = checked.tensors;
    for (const OpenChoice& choice : choices) {
      const bool is_shared = choice.expert < 0;
      const std::int64_t width = is_shared ? spec.shared_intermediate : spec.intermediate;
      const std::int64_t output = (choice.output + outputs_further) % (2 * width);
      const std::int64_t row = (is_shared ? 0 : choice.expert * 2 * width) + output;
      const std::vector<bf16>& w13 = is_shared ? checked.problem.shared_w13 : checked.problem.w13;
      std::vector<float>& gradient = is_shared ? tensors.dshared_w13 : tensors.dw13;
      const double difference = times * choice.difference;
      for (std::int64_t j = 0; j < hidden; ++j) {
        const double x = static_cast<double>(to_float(checked.problem.x[choice.token * hidden + j]));
        const double w = static_cast<double>(to_float(w13[row * hidden + j]));
        float& dw = gradient[row * hidden + j];
        float& dx = tensors.dx[choice.token * hidden + j];
        dw = static_cast<float>(rounded(static_cast<double>(dw) + difference * x));
        dx = static_cast<float>(rounded(static_cast<double>(dx) + difference * w));
      }
    }
    const std::vector<TensorReport> reports = checked.reports(tensors);
    return std::all_of(reports.begin(), reports.end(), [](const TensorReport& report) { return report.ok(); });
  };
  EXPECT_TRUE(with_other_side(0.0, 0));
  EXPECT_TRUE(with_other_side(1.0, 0));
  EXPECT_FALSE(with_other_side(-1.0, 0));
  EXPECT_FALSE(with_other_side(1.0, 1));
}

class WrongPartIsReported : public testing::Test {
 protected:
  static const Case& checked() {
    static const Case kCase([] {
      ProblemSpec spec = spec_of(1021);
      spec.shared_intermediate = 96;
      return spec;
    }());
    return kCase;
  }

  static void expect_reported(const char* what, const Layout& layout, const Mistake& mistake) {
    LayerTensors wrong = checked().tensors;
    mistake(tensor_of(wrong, layout.name), layout);
    for (const TensorReport& report : checked().reports(wrong)) {
      EXPECT_EQ(report.ok(), report.name != layout.name) << what << " of " << layout.name << " in " << report.name;
    }
  }
};

void swap_rows(std::vector<float>& tensor, const Layout& layout, std::int64_t a, std::int64_t b,
               std::int64_t rows = 1) {
  std::swap_ranges(tensor.begin() + a * layout.columns, tensor.begin() + (a + rows) * layout.columns,
                   tensor.begin() + b * layout.columns);
}

void scale_part(std::vector<float>& tensor, const Layout& layout, std::int64_t first_row, std::int64_t rows,
                std::int64_t first_column, std::int64_t columns, float factor) {
  for (std::int64_t row = first_row; row < first_row + rows; ++row) {
    for (std::int64_t column = first_column; column < first_column + columns; ++column) {
      tensor[row * layout.columns + column] *= factor;
    }
  }
}

// CASES row 35: a wrong row.
TEST_F(WrongPartIsReported, Case35OneRow) {
  for (const Layout& layout : layouts(checked().problem)) {
    for (const std::int64_t row : {std::int64_t{0}, layout.rows / 2, layout.rows - 2}) {
      expect_reported("a row swapped with the next", layout,
                      [&](auto& t, const Layout& l) { swap_rows(t, l, row, row + 1); });
      expect_reported("a row left out", layout,
                      [&](auto& t, const Layout& l) { scale_part(t, l, row, 1, 0, l.columns, 0.0f); });
      // Two elements tell too little about a row for a smaller mistake.
      if (layout.columns < 16) continue;
      expect_reported("a row that is 5 % too large", layout,
                      [&](auto& t, const Layout& l) { scale_part(t, l, row, 1, 0, l.columns, 1.05f); });
    }
  }
}

// CASES row 35: a wrong expert.
TEST_F(WrongPartIsReported, Case35OneExpert) {
  for (const Layout& layout : layouts(checked().problem)) {
    if (layout.experts == 1) continue;
    const std::int64_t rows = layout.rows / layout.experts;
    for (std::int64_t e = 0; e < layout.experts; ++e) {
      const std::int64_t first = e * rows;
      const std::int64_t other = (e + 1) % layout.experts * rows;
      expect_reported("an expert swapped with the next", layout,
                      [&](auto& t, const Layout& l) { swap_rows(t, l, first, other, rows); });
      expect_reported("an expert that is 1 % too large", layout,
                      [&](auto& t, const Layout& l) { scale_part(t, l, first, rows, 0, l.columns, 1.01f); });
    }
  }
}

// CASES row 35: a wrong block of 16 columns.
TEST_F(WrongPartIsReported, Case35OneColumnBlock) {
  for (const Layout& layout : layouts(checked().problem)) {
    const std::int64_t width = std::min<std::int64_t>(16, layout.columns);
    for (std::int64_t column = 0; column + width <= layout.columns; column += 48) {
      expect_reported("a block left out", layout,
                      [&](auto& t, const Layout& l) { scale_part(t, l, 0, l.rows, column, width, 0.0f); });
      expect_reported("a block that is 1 % too large", layout,
                      [&](auto& t, const Layout& l) { scale_part(t, l, 0, l.rows, column, width, 1.01f); });
    }
  }
}

// One term of the sum behind 16 columns: those of out without one column of W2, as if a K step were skipped there.
TEST_F(WrongPartIsReported, OneTermMissingFromAColumnBlock) {
  ProblemSpec spec = spec_of(1021);
  spec.shared_intermediate = 96;
  Problem broken = make_problem(spec, kThreads);
  for (std::int64_t e = 0; e < broken.shape.num_experts; ++e) {
    for (std::int64_t j = 32; j < 48; ++j) {
      broken.w2[(e * broken.shape.hidden + j) * broken.shape.intermediate + 5] = bf16{0};
    }
  }
  const LayerTensors other = emulate_engine(broken, kThreads);
  expect_reported("a missing term", layouts(broken)[0], [&](auto& t, const Layout&) { t = other.out; });
}

TEST_F(WrongPartIsReported, OneElementThatIsNotFinite) {
  for (const Layout& layout : layouts(checked().problem)) {
    expect_reported("a NaN", layout, [](auto& t, const Layout&) { t[t.size() / 2] = NAN; });
  }
}

}  // namespace
}  // namespace clowder::check

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "model/all_activations.h"

namespace clowder {
namespace {

// The formulas once more, as the papers have them, by the C library.
double formula(const Activation& activation, double g, double u) {
  const double most = activation.kind == ActivationKind::kGptOss ? 7.0 : static_cast<double>(activation.limit);
  const double clamped_g = std::min(g, most);
  const double clamped_u = std::clamp(u, -most, most);
  const auto silu = [](double x) { return x / (1.0 + std::exp(-x)); };
  switch (activation.kind) {
    case ActivationKind::kSwiglu:
      return silu(g) * u;
    case ActivationKind::kSwigluClamp:
      return silu(clamped_g) * clamped_u;
    case ActivationKind::kGeglu: {
      const double z = std::sqrt(2.0 / std::acos(-1.0)) * (g + 0.044715 * g * g * g);
      return 0.5 * g * (1.0 + std::tanh(z)) * u;
    }
    case ActivationKind::kReglu:
      return std::max(g, 0.0) * u;
    case ActivationKind::kGptOss:
      return (clamped_u + 1.0) * clamped_g / (1.0 + std::exp(-1.702 * clamped_g));
  }
  return NAN;
}

TEST(Activation, ValuesAreThoseOfTheFormula) {
  std::mt19937 random(1);
  std::normal_distribution<double> normal(0.0, 4.0);
  for (const Activation& kind : all_activations()) {
    with_activation(kind, [&](const auto& activation) {
      for (int i = 0; i < 20000; ++i) {
        const double g = normal(random);
        const double u = normal(random);
        // 1 + tanh z cancels where z is low.
        ASSERT_NEAR(activation.value(g, u), formula(kind, g, u), 1e-14 * (1.0 + std::abs(g * u))) << to_string(kind);
      }
    });
  }
}

TEST(Activation, DerivativesAreThoseOfTheValue) {
  std::mt19937 random(2);
  std::normal_distribution<double> normal(0.0, 4.0);
  for (const Activation& kind : all_activations()) {
    with_activation(kind, [&](const auto& activation) {
      int compared = 0;
      for (int i = 0; i < 20000; ++i) {
        const double g = normal(random);
        const double u = normal(random);
        constexpr double kStep = 1e-5;
        if (!is_smooth_around(activation, g, u, kStep)) continue;
        ++compared;
        const GatedGradient<double> f = activation.gradient(g, u);
        const double dg = (activation.value(g + kStep, u) - activation.value(g - kStep, u)) / (2 * kStep);
        const double du = (activation.value(g, u + kStep) - activation.value(g, u - kStep)) / (2 * kStep);
        ASSERT_NEAR(f.dg, dg, 1e-8 * (1.0 + std::abs(u))) << to_string(kind) << " " << g << " " << u;
        ASSERT_NEAR(f.du, du, 1e-8 * (1.0 + std::abs(g))) << to_string(kind) << " " << g << " " << u;
      }
      EXPECT_GT(compared, 19900) << to_string(kind);
    });
  }
}

// What roundings in the argument x(g) of an activation's sigmoid do, in units of 2^-24: a relative error r of x changes
// the sigmoid by at most |x| r of it. `slope` is dx/dg.
struct Argument {
  double roundings;
  double slope;
};

Argument sigmoid_argument(const Activation& kind, double g) {
  switch (kind.kind) {
    case ActivationKind::kReglu:
      return {0.0, 0.0};
    case ActivationKind::kGeglu:
      return {6.0 * std::abs(1.596 * (g + 0.044715 * g * g * g)), 1.596 * (1.0 + 0.134145 * g * g)};
    case ActivationKind::kGptOss:
      return {2.0 * std::abs(1.702 * g), 1.702};
    case ActivationKind::kSwiglu:
    case ActivationKind::kSwigluClamp:
      break;
  }
  return {0.0, 1.0};
}

TEST(Activation, FloatAgreesWithDouble) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0.0f, 4.0f);
  for (const Activation& kind : all_activations()) {
    with_activation(kind, [&](const auto& activation) {
      for (int i = 0; i < 50000; ++i) {
        const float g = normal(random);
        const float u = normal(random);
        const GatedGradient<float> single = activation.gradient(g, u);
        const GatedGradient<double> exact = activation.gradient(static_cast<double>(g), static_cast<double>(u));
        const double exact_g = static_cast<double>(g);
        const Argument argument = sigmoid_argument(kind, exact_g);
        // A handful of roundings besides; the derivative by g is a sum that cancels near its zero, and holds 1 - s.
        const double tolerance = (16.0 + argument.roundings) * 0x1p-24;
        const double size = 1.0 + std::abs(exact_g) * argument.slope;
        const double factor = std::abs(static_cast<double>(u)) + (kind.kind == ActivationKind::kGptOss ? 1.0 : 0.0);
        // Where the sigmoid underflows, nothing of its precision is left.
        constexpr double kTiny = 0x1p-120;
        ASSERT_NEAR(static_cast<double>(single.value), exact.value, tolerance * std::abs(exact.value) + kTiny);
        ASSERT_NEAR(static_cast<double>(single.dg), exact.dg, tolerance * size * factor + kTiny)
            << to_string(kind) << g;
        ASSERT_NEAR(static_cast<double>(single.du), exact.du, tolerance * std::abs(exact.du) + kTiny);
        ASSERT_EQ(single.value, activation.value(g, u));
      }
    });
  }
}

// Finite where the exact result is, at every bf16 value of g.
TEST(Activation, NoFiniteGateOverflowsByItself) {
  for (const Activation& kind : all_activations()) {
    with_activation(kind, [&](const auto& activation) {
      for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
        const float g = to_float(bf16{static_cast<std::uint16_t>(bits)});
        if (!std::isfinite(g)) continue;
        for (const float u : {-0.5f, 0.0f, 0.25f}) {
          const GatedGradient<float> f = activation.gradient(g, u);
          ASSERT_TRUE(std::isfinite(f.value) && std::isfinite(f.dg) && std::isfinite(f.du)) << to_string(kind) << g;
          ASSERT_LE(std::abs(f.value), std::abs(g) * 1.25f);
          // gelu' and the like overshoot 1 a little.
          ASSERT_LE(std::abs(f.dg), 1.25f * 1.25f) << to_string(kind) << g;
        }
      }
    });
  }
}

TEST(Activation, ClampsDerivativeIsOneAtItsLimitAndZeroBeyond) {
  const SwigluClamp clamp{2.0f};
  const Swiglu plain;
  EXPECT_EQ(clamp.gradient(2.0f, 1.0f).dg, plain.gradient(2.0f, 1.0f).dg);
  EXPECT_EQ(clamp.gradient(1.0f, 2.0f).du, plain.gradient(1.0f, 2.0f).du);
  EXPECT_EQ(clamp.gradient(1.0f, -2.0f).du, plain.gradient(1.0f, -2.0f).du);
  EXPECT_EQ(clamp.gradient(2.015625f, 1.0f).dg, 0.0f);
  EXPECT_EQ(clamp.gradient(1.0f, 2.015625f).du, 0.0f);
  EXPECT_EQ(clamp.gradient(1.0f, -2.015625f).du, 0.0f);
  EXPECT_EQ(clamp.value(100.0f, 100.0f), plain.value(2.0f, 2.0f));
  EXPECT_EQ(clamp.value(-100.0f, -100.0f), plain.value(-100.0f, -2.0f));
}

TEST(Activation, GptOssIsClampedAtSevenAndAddsOne) {
  const GptOss f;
  const GptOssUnclamped plain;
  EXPECT_EQ(f.value(100.0f, 100.0f), plain.value(7.0f, 7.0f));
  EXPECT_EQ(f.value(-100.0f, -100.0f), plain.value(-100.0f, -7.0f));
  EXPECT_EQ(f.value(3.0f, -1.0f), 0.0f);
  EXPECT_EQ(f.gradient(7.0f, 7.0f).dg, plain.gradient(7.0f, 7.0f).dg);
  EXPECT_EQ(f.gradient(7.0f, -7.0f).du, plain.gradient(7.0f, -7.0f).du);
  EXPECT_EQ(f.gradient(7.03125f, 1.0f).dg, 0.0f);
  EXPECT_EQ(f.gradient(1.0f, 7.03125f).du, 0.0f);
  EXPECT_EQ(f.gradient(1.0f, -7.03125f).du, 0.0f);
}

TEST(Activation, RegluIsOffAtZero) {
  const Reglu f;
  EXPECT_EQ(f.gradient(0.0f, 3.0f).dg, 0.0f);
  EXPECT_EQ(f.gradient(-0.0f, 3.0f).dg, 0.0f);
  EXPECT_EQ(f.gradient(0x1p-126f, 3.0f).dg, 3.0f);
  EXPECT_EQ(f.gradient(2.0f, 3.0f).du, 2.0f);
  EXPECT_EQ(f.value(-2.0f, 3.0f), 0.0f);
}

// In the value, and in the derivative by the other one, so that it reaches dx. The points are inside all limits.
TEST(Activation, NanStaysNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Activation& kind : all_activations()) {
    with_activation(kind, [&](const auto& activation) {
      EXPECT_TRUE(std::isnan(activation.value(nan, 0.5f))) << to_string(kind);
      EXPECT_TRUE(std::isnan(activation.value(0.5f, nan))) << to_string(kind);
      EXPECT_TRUE(std::isnan(activation.gradient(nan, 0.5f).du)) << to_string(kind);
      EXPECT_TRUE(std::isnan(activation.gradient(0.5f, nan).dg)) << to_string(kind);
      EXPECT_TRUE(std::isnan(activation.value(-1.0f, nan))) << to_string(kind);
    });
  }
}

TEST(ActivationName, IsReadBackAsItIsWritten) {
  for (const char* name :
       {"swiglu", "swiglu-clamp:7", "swiglu-clamp:0.1", "swiglu-clamp:1.5", "geglu", "reglu", "gpt-oss"}) {
    EXPECT_EQ(to_string(parse_activation(name)), name);
  }
  EXPECT_EQ(parse_activation("swiglu-clamp:7.0").limit, 7.0f);
}

TEST(ActivationName, OtherNamesAreRefused) {
  for (const char* name :
       {"", "gelu", "swiglu ", "swiglu-clamp", "swiglu-clamp:", "swiglu-clamp:0", "swiglu-clamp:-1", "swiglu-clamp:inf",
        "swiglu-clamp:nan", "swiglu-clamp:7x", "SwiGLU", "geglu:7", "relu", "gpt-oss:7", "gpt_oss"}) {
    try {
      parse_activation(name);
      ADD_FAILURE() << name;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kArgument);
      EXPECT_NE(std::string(error.what()).find("activation: \"" + std::string(name) + "\""), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace clowder

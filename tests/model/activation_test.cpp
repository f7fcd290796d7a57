#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "model/activation/dispatch.h"
#include "model/activation/name.h"

namespace clowder {
namespace {

std::vector<Activation> all_activations() {
  return {{}, {ActivationKind::kSwigluClamp, 7.0f}, {ActivationKind::kSwigluClamp, 0.75f}};
}

// Where no clamp's corner is near: a difference quotient across one means nothing.
bool is_smooth_at(const Activation& activation, double g, double u) {
  if (activation.kind != ActivationKind::kSwigluClamp) return true;
  const double limit = static_cast<double>(activation.limit);
  return std::abs(g - limit) > 1e-3 && std::abs(std::abs(u) - limit) > 1e-3;
}

TEST(Activation, DerivativesAreThoseOfTheValue) {
  std::mt19937 random(2);
  std::normal_distribution<double> normal(0.0, 4.0);
  for (const Activation& kind : all_activations()) {
    with_activation(kind, [&](const auto& activation) {
      for (int i = 0; i < 20000; ++i) {
        const double g = normal(random);
        const double u = normal(random);
        if (!is_smooth_at(kind, g, u)) continue;
        constexpr double kStep = 1e-5;
        const GatedGradient<double> f = activation.gradient(g, u);
        const double dg = (activation.value(g + kStep, u) - activation.value(g - kStep, u)) / (2 * kStep);
        const double du = (activation.value(g, u + kStep) - activation.value(g, u - kStep)) / (2 * kStep);
        ASSERT_EQ(f.value, activation.value(g, u));
        ASSERT_NEAR(f.dg, dg, 1e-8 * (1.0 + std::abs(u))) << to_string(kind) << " " << g << " " << u;
        ASSERT_NEAR(f.du, du, 1e-8 * (1.0 + std::abs(g))) << to_string(kind) << " " << g << " " << u;
      }
    });
  }
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
        // A handful of roundings; silu'(g) is a sum that cancels near its zero.
        const double tolerance = 16.0 * 0x1p-24;
        const double size = std::abs(static_cast<double>(g)) + 1.0;
        ASSERT_NEAR(static_cast<double>(single.value), exact.value, tolerance * std::abs(exact.value));
        ASSERT_NEAR(static_cast<double>(single.dg), exact.dg, tolerance * size * (std::abs(static_cast<double>(u))));
        ASSERT_NEAR(static_cast<double>(single.du), exact.du, tolerance * (std::abs(exact.du)));
        ASSERT_EQ(single.value, activation.value(g, u));
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

TEST(Activation, NanStaysNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Activation& kind : all_activations()) {
    with_activation(kind, [&](const auto& activation) {
      EXPECT_TRUE(std::isnan(activation.value(nan, 1.0f)));
      EXPECT_TRUE(std::isnan(activation.value(1.0f, nan)));
      EXPECT_TRUE(std::isnan(activation.gradient(nan, 1.0f).dg));
      EXPECT_TRUE(std::isnan(activation.gradient(1.0f, nan).value));
    });
  }
}

TEST(ActivationName, IsReadBackAsItIsWritten) {
  for (const char* name : {"swiglu", "swiglu-clamp:7", "swiglu-clamp:0.1", "swiglu-clamp:1.5"}) {
    EXPECT_EQ(to_string(parse_activation(name)), name);
  }
  EXPECT_EQ(parse_activation("swiglu-clamp:7.0").limit, 7.0f);
}

TEST(ActivationName, OtherNamesAreRefused) {
  for (const char* name : {"", "gelu", "swiglu ", "swiglu-clamp", "swiglu-clamp:", "swiglu-clamp:0", "swiglu-clamp:-1",
                           "swiglu-clamp:inf", "swiglu-clamp:nan", "swiglu-clamp:7x", "SwiGLU"}) {
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

#include "model/elementary.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace clowder {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The distance from `exact` in units of the last place of a float of that size.
double ulps(float value, double exact) {
  const double unit = std::max(std::ldexp(1.0, std::ilogb(exact) - 23), 0x1p-149);
  return std::abs(static_cast<double>(value) - exact) / unit;
}

TEST(Exponential, IsWithinTwoUnitsInTheLastPlace) {
  double worst = 0.0;
  // Every 97th float of both signs whose exponential is finite and not 0.
  for (std::uint32_t bits = 0; bits < float_bits(104.0f); bits += 97) {
    for (const float x : {bits_float(bits), -bits_float(bits)}) {
      const double exact = std::exp(static_cast<double>(x));
      if (exact > static_cast<double>(std::numeric_limits<float>::max())) continue;
      worst = std::max(worst, ulps(exponential(x), exact));
    }
  }
  EXPECT_LE(worst, 2.0);
}

TEST(Exponential, EndsAreZeroAndInfinity) {
  EXPECT_EQ(exponential(0.0f), 1.0f);
  EXPECT_EQ(exponential(-0.0f), 1.0f);
  for (const float x : {89.0f, 100.0f, 1e30f, kInfinity}) EXPECT_EQ(exponential(x), kInfinity) << x;
  for (const float x : {-104.0f, -1e30f, -kInfinity}) EXPECT_EQ(exponential(x), 0.0f) << x;
  EXPECT_TRUE(std::isnan(exponential(std::numeric_limits<float>::quiet_NaN())));
}

TEST(Exponential, DoesNotFallTowardsItsEnds) {
  float last = 0.0f;
  for (float x = -110.0f; x < 95.0f; x += 0.01f) {
    const float value = exponential(x);
    ASSERT_GE(value, last) << x;
    last = value;
  }
}

TEST(Sigmoid, IsRightAtItsEndsAndBetween) {
  EXPECT_EQ(sigmoid(kInfinity), 1.0f);
  EXPECT_EQ(sigmoid(-kInfinity), 0.0f);
  EXPECT_EQ(sigmoid(0.0f), 0.5f);
  EXPECT_TRUE(std::isnan(sigmoid(std::numeric_limits<float>::quiet_NaN())));
  for (float x = -80.0f; x < 80.0f; x += 0.037f) {
    const double exact = 1.0 / (1.0 + std::exp(-static_cast<double>(x)));
    ASSERT_NEAR(static_cast<double>(sigmoid(x)), exact, 4.0 * 0x1p-24 * exact) << x;
  }
}

}  // namespace
}  // namespace clowder

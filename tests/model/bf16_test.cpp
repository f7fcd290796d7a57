#include "model/bf16.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace clowder {
namespace {

bool is_nan(bf16 value) { return (value.bits & 0x7fffu) > 0x7f80u; }

// The nearest of all bf16 values, ties to the even one, by exact arithmetic in double.
bf16 nearest(float value) {
  bf16 below{static_cast<std::uint16_t>(float_bits(value) >> 16)};  // towards zero
  const bf16 above{static_cast<std::uint16_t>(below.bits + 1)};
  const double low = std::abs(static_cast<double>(to_float(below)));
  // Beyond the largest finite value stands 2^128, where infinity begins for rounding.
  const double high = (above.bits & 0x7fffu) == 0x7f80u ? 0x1p128 : std::abs(static_cast<double>(to_float(above)));
  const double exact = std::abs(static_cast<double>(value));
  if (exact - low == high - exact) return (below.bits & 1u) == 0 ? below : above;
  return exact - low < high - exact ? below : above;
}

TEST(Bf16, EveryValueSurvivesARoundTrip) {
  for (std::uint32_t bits = 0; bits <= 0xffffu; ++bits) {
    const bf16 value{static_cast<std::uint16_t>(bits)};
    const bf16 back = to_bf16(to_float(value));
    if (is_nan(value)) {
      EXPECT_TRUE(is_nan(back)) << bits;
      EXPECT_EQ(back.bits & 0x40u, 0x40u) << "quiet";
    } else {
      EXPECT_EQ(back.bits, value.bits);
    }
  }
}

TEST(Bf16, RoundsToNearestEven) {
  std::mt19937 random(1);
  for (int i = 0; i < 2000000; ++i) {
    // Half of the values are ties or stand next to one.
    auto bits = static_cast<std::uint32_t>(random());
    if (i % 2 == 0) bits = (bits & 0xffff0000u) + 0x8000u + (bits % 3u) - 1u;
    const float value = bits_float(bits);
    if (!std::isfinite(value)) continue;
    ASSERT_EQ(to_bf16(value).bits, nearest(value).bits) << std::hexfloat << value;
  }
}

TEST(Bf16, InfinityStaysAndTheLargestFloatBecomesIt) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(to_float(to_bf16(infinity)), infinity);
  EXPECT_EQ(to_float(to_bf16(-infinity)), -infinity);
  EXPECT_EQ(to_float(to_bf16(std::numeric_limits<float>::max())), infinity);
}

}  // namespace
}  // namespace clowder

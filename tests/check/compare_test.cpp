#include "check/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <vector>

namespace clowder::check {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr TensorShape kShape{2, 3, 40};

std::vector<double> reference() {
  std::vector<double> values(kShape.elements());
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = 1.0 + static_cast<double>(i % 7);
  return values;
}

std::vector<float> as_floats(const std::vector<double>& values) { return {values.begin(), values.end()}; }

TEST(Compare, ExactValuesHaveNoError) {
  const Comparison errors = compare(as_floats(reference()), reference(), kShape);
  EXPECT_EQ(errors.rel, 0.0);
  EXPECT_EQ(errors.rel_worst_column_block, 0.0);
  EXPECT_EQ(errors.rel_worst_row, 0.0);
  EXPECT_EQ(errors.rel_worst_expert, 0.0);
  EXPECT_EQ(errors.worst_row_error, 0.0);
}

// One element is wrong by 1: every part that holds it shows that error over its own norm.
TEST(Compare, EachPartIsMeasuredByItsOwnNorm) {
  const std::vector<double> expected = reference();
  for (const std::int64_t row : {0, 4}) {
    for (const std::int64_t column : {0, 17, 39}) {
      std::vector<float> actual = as_floats(expected);
      actual[row * 40 + column] += 1.0f;
      double all = 0.0, block = 0.0, of_row = 0.0, expert = 0.0;
      for (std::int64_t i = 0; i < kShape.elements(); ++i) {
        const double square = expected[i] * expected[i];
        all += square;
        if (i / 40 == row) of_row += square;
        if (i / 120 == row / 3) expert += square;
        if (i % 40 / 16 == column / 16) block += square;
      }
      const Comparison errors = compare(actual, expected, kShape);
      EXPECT_DOUBLE_EQ(errors.rel, 1.0 / std::sqrt(all));
      EXPECT_DOUBLE_EQ(errors.rel_worst_column_block, 1.0 / std::sqrt(block));
      EXPECT_DOUBLE_EQ(errors.rel_worst_row, 1.0 / std::sqrt(of_row));
      EXPECT_DOUBLE_EQ(errors.rel_worst_expert, 1.0 / std::sqrt(expert));
      EXPECT_DOUBLE_EQ(errors.worst_row_error, 1.0 / std::sqrt(std::max(of_row, expert / 3.0)));
    }
  }
}

TEST(Compare, ZerosAreRightOnlyWhereTheReferenceIsZero) {
  const std::vector<double> zeros(kShape.elements(), 0.0);
  std::vector<float> actual(kShape.elements(), 0.0f);
  EXPECT_EQ(compare(actual, zeros, kShape).rel, 0.0);
  actual[50] = -0.0f;
  EXPECT_EQ(compare(actual, zeros, kShape).rel, 0.0);
  actual[50] = 1e-30f;
  const Comparison errors = compare(actual, zeros, kShape);
  for (const double error : {errors.rel, errors.rel_worst_column_block, errors.rel_worst_row, errors.rel_worst_expert,
                             errors.worst_row_error}) {
    EXPECT_TRUE(std::isinf(error));
  }

  // One row of a tensor that is otherwise not zero.
  std::vector<double> expected = reference();
  std::fill(expected.begin() + 40, expected.begin() + 80, 0.0);
  std::vector<float> almost = as_floats(expected);
  EXPECT_EQ(compare(almost, expected, kShape).rel_worst_row, 0.0);
  almost[45] = 1e-3f;
  EXPECT_TRUE(std::isinf(compare(almost, expected, kShape).rel_worst_row));
  EXPECT_TRUE(std::isfinite(compare(almost, expected, kShape).rel));
  // All of the reference missing is an error of 1.
  EXPECT_DOUBLE_EQ(compare(std::vector<float>(kShape.elements(), 0.0f), reference(), kShape).rel, 1.0);
}

// What engines flush to zero, or cannot hold, is no error; anything that they can hold is.
TEST(Compare, ValuesBelowTheNormalOnesAreNoErrors) {
  std::vector<double> expected(static_cast<std::size_t>(kShape.elements()), 1e-60);
  const std::vector<float> zeros(expected.size(), 0.0f);
  EXPECT_EQ(compare(zeros, expected, kShape).rel_worst_row, 0.0);
  expected[50] = 1e-35;
  EXPECT_EQ(compare(zeros, expected, kShape).rel_worst_row, 1.0);
}

TEST(Compare, ValuesThatAreNotFiniteAreInfinitelyWrong) {
  for (const float bad : {kNan, -kNan, kInfinity, -kInfinity}) {
    std::vector<float> actual = as_floats(reference());
    actual[100] = bad;
    const Comparison errors = compare(actual, reference(), kShape);
    EXPECT_TRUE(std::isinf(errors.rel));
    EXPECT_TRUE(std::isinf(errors.rel_worst_column_block));
    EXPECT_TRUE(std::isinf(errors.rel_worst_row));
    EXPECT_TRUE(std::isinf(errors.rel_worst_expert));
    EXPECT_TRUE(std::isinf(errors.worst_row_error));
  }
}

TEST(Compare, EmptyTensorsAreRight) {
  EXPECT_EQ(compare({}, {}, {1, 0, 256}).rel, 0.0);
  EXPECT_EQ(compare({}, {}, {1, 0, 256}).worst_row_error, 0.0);
}

TEST(Digest, DependsOnEveryBitAndOnTheOrder) {
  std::vector<float> values(1000);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  std::set<std::string> seen = {digest(std::span<const float>(values))};
  EXPECT_EQ(seen.begin()->size(), 16u);
  EXPECT_EQ(*seen.begin(), digest(std::span<const float>(std::vector<float>(values))));
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::vector<float> changed = values;
    changed[i] = -changed[i];
    EXPECT_TRUE(seen.insert(digest(std::span<const float>(changed))).second) << "sign of " << i;
    changed = values;
    std::swap(changed[i], changed[(i + 4) % 1000]);
    EXPECT_TRUE(seen.insert(digest(std::span<const float>(changed))).second) << "swap of " << i;
  }
  std::vector<bf16> zeros;
  for (int count = 0; count < 50; ++count) {
    EXPECT_TRUE(seen.insert(digest(std::span<const bf16>(zeros))).second) << count << " zeros";
    zeros.push_back(bf16{0});
  }
}

}  // namespace
}  // namespace clowder::check

// The plan keeps its promises on random plans, however its agents interleave.
#include "explorer.h"

#include <gtest/gtest.h>

#include "test_scale.h"

namespace clowder::plan::explore {
namespace {

constexpr std::uint64_t kParts = 4;  // tests that can run side by side

void explore_plans(std::uint64_t first_seed, std::uint64_t count) {
  Explorer explorer;
  for (std::uint64_t seed = first_seed; seed < first_seed + count; ++seed) {
    const Result result = explorer.run(random_plan(seed));
    ASSERT_FALSE(result.failed) << result.what << "\nagain with clowder_explore --plans 1 --seed " << seed;
    ASSERT_GT(result.tasks, 0);
  }
}

class Exploration : public ::testing::TestWithParam<std::uint64_t> {};

TEST_P(Exploration, NoPlanBreaksAPromise) {
  const std::uint64_t plans = scaled<std::uint64_t>(60000, 1000) / kParts;
  explore_plans(GetParam() * 1'000'000, plans);
}

INSTANTIATE_TEST_SUITE_P(Part, Exploration, ::testing::Range<std::uint64_t>(1, 1 + kParts));

TEST(LongExploration, NoPlanBreaksAPromise) { explore_plans(100'000'000, scaled<std::uint64_t>(1'000'000, 10'000)); }

TEST(ExplorerRuns, AreTheSameForTheSameSeed) {
  Explorer first;
  Explorer second;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const Result once = first.run(random_plan(seed));
    const Result again = second.run(random_plan(seed));
    EXPECT_EQ(once.steps, again.steps);
    EXPECT_EQ(once.tasks, again.tasks);
  }
}

}  // namespace
}  // namespace clowder::plan::explore

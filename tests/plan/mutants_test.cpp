// Each broken plan is told from the plan within a few random plans.
#include "mutants.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <set>
#include <string>

#include "explorer.h"

namespace clowder::plan::explore {
namespace {

constexpr std::uint64_t kFirstSeed = 1;
constexpr std::uint64_t kMostPlans = 10000;

class Mutants : public ::testing::TestWithParam<Mutant> {};

TEST_P(Mutants, AreKilled) {
  Explorer explorer;
  for (std::uint64_t plans = 1; plans <= kMostPlans; ++plans) {
    const Result result = explorer.run(random_plan(kFirstSeed + plans - 1), &GetParam());
    if (!result.failed) continue;
    std::printf("%s: killed by plan %llu\n  %s\n", GetParam().name, static_cast<unsigned long long>(plans),
                result.what.c_str());
    return;
  }
  FAIL() << GetParam().name << " survives " << kMostPlans << " plans";
}

INSTANTIATE_TEST_SUITE_P(All, Mutants, ::testing::ValuesIn(all_mutants()),
                         [](const ::testing::TestParamInfo<Mutant>& mutant) { return std::string(mutant.param.name); });

TEST(MutantList, HasNoNameTwice) {
  std::set<std::string> names;
  for (const Mutant& mutant : all_mutants()) {
    EXPECT_TRUE(names.insert(mutant.name).second) << mutant.name;
    EXPECT_EQ(find_mutant(mutant.name), &mutant);
  }
  EXPECT_EQ(find_mutant("no_such_mutant"), nullptr);
}

}  // namespace

// How GoogleTest prints a parameter.
void PrintTo(const Mutant& mutant, std::ostream* stream) { *stream << mutant.name; }

}  // namespace clowder::plan::explore

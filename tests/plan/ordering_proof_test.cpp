// No interleaving of a plan's tasks can break it: a proof for each of many random plans.
#include "ordering_proof.h"

#include <gtest/gtest.h>

#include "test_scale.h"

namespace clowder::plan::explore {
namespace {

TEST(OrderingProof, HoldsForRandomPlans) {
  OrderingProver prover;
  const std::uint64_t plans = scaled<std::uint64_t>(10000, 300);
  std::uint64_t proved = 0;
  for (std::uint64_t seed = 1; seed <= plans; ++seed) {
    const Result result = prover.run(random_plan(seed));
    ASSERT_FALSE(result.failed) << result.what;
    if (result.tasks > 0) ++proved;
  }
  EXPECT_GT(proved, plans / 10 * 9);
}

// Whether the proof follows what the mutant breaks: an order between tasks, and not progress or a value.
bool breaks_order(const Mutant& mutant) {
  return mutant.edit_waits != nullptr || mutant.signals_at_begin != nullptr || mutant.single_ids_buffer ||
         mutant.ignores_last_writer;
}

TEST(OrderingProof, FailsForEveryMutantThatBreaksAnOrder) {
  OrderingProver prover;
  for (const Mutant& mutant : all_mutants()) {
    if (!breaks_order(mutant)) continue;
    bool is_found = false;
    for (std::uint64_t seed = 1; seed <= 200 && !is_found; ++seed) {
      is_found = prover.run(random_plan(seed), &mutant).failed;
    }
    EXPECT_TRUE(is_found) << mutant.name;
  }
}

}  // namespace
}  // namespace clowder::plan::explore

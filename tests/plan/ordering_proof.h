// Proves for one plan that no interleaving can break it, instead of trying some.
//
// Tasks are ordered by nothing but waits, signals and the ends of launches: neither by their tickets nor by their
// agents. If one order that these allow gives every reader what it expects, and every two accesses that conflict are
// ordered by them, then all orders give the same. Deadlocks are another matter (see plan_properties_test.cpp).
#pragma once

#include <memory>

#include "explorer.h"

namespace clowder::plan::explore {

class OrderingProver {
 public:
  OrderingProver();
  ~OrderingProver();
  OrderingProver(const OrderingProver&) = delete;
  OrderingProver& operator=(const OrderingProver&) = delete;

  // Result::tasks is 0 where the plan has too many tasks for a proof. Mutants that change counters or epochs as such
  // (keeps_counters, accepts_old_epoch) are not followed.
  Result run(const PlanSpec& spec, const Mutant* mutant = nullptr);

 private:
  class Proof;
  std::unique_ptr<Proof> proof_;
};

}  // namespace clowder::plan::explore

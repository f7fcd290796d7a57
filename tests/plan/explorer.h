// A simulated engine. It runs a plan's launches step by step on one thread, lets a scheduler choose who takes the next
// step, and holds every task to the access table.
//
// A task takes three steps: its agent takes the ticket; its waits hold and its accesses begin; its accesses end and it
// signals. Anything may happen between two of them. Flags reach each reader later, in order for each writer.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "mutants.h"
#include "random_plan.h"

namespace clowder::plan::explore {

struct Result {
  bool failed = false;
  std::string what;  // of a failure: which task of which pass did what
  std::int64_t tasks = 0;
  std::int64_t steps = 0;
};

class Explorer {
 public:
  Explorer();
  ~Explorer();
  Explorer(const Explorer&) = delete;
  Explorer& operator=(const Explorer&) = delete;

  Result run(const PlanSpec& spec, const Mutant* mutant = nullptr);

 private:
  class Simulation;
  std::unique_ptr<Simulation> simulation_;
};

}  // namespace clowder::plan::explore

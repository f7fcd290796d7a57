// Plans that are broken on purpose, one dependency each. An explorer that cannot tell them from the plan is worthless.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "launch_plan.h"
#include "plan/task.h"
#include "random_plan.h"

namespace clowder::plan::explore {

// A task's waits and signals, as data that a mutant can change.
struct Wait {
  bool is_flag = false;
  FlagKind flag = FlagKind::kDone;
  CounterKind counter = CounterKind::kPulled;
  std::int64_t index = 0;
  std::int32_t at_least = 0;
};
struct Signal {
  bool is_flag = false;
  FlagKind flag = FlagKind::kDone;
  CounterKind counter = CounterKind::kPulled;
  std::int64_t index = 0;
};

// Members that are empty leave the plan as it is.
struct Mutant {
  const char* name = nullptr;
  void (*edit_waits)(const PassShape&, const RankPass&, const Task&, std::vector<Wait>&) = nullptr;
  bool (*signals_at_begin)(const Task&) = nullptr;  // the task signals before it has done its work
  EditShape edit_emission = nullptr;
  void (*edit_shape)(PassShape&) = nullptr;
  void (*edit_queues)(const PassShape&, Queues&) = nullptr;
  bool keeps_counters = false;
  bool single_ids_buffer = false;
  bool accepts_old_epoch = false;
  bool ignores_last_writer = false;
};

// The plan's own waits and queues, changed by the mutant.
void list_waits(const PassShape& shape, const RankPass& rank, const Task& task, const Mutant& mutant,
                std::vector<Wait>& waits);
void build_launch(const PlanSpec& spec, const Operation& operation, const std::vector<ConstSchedule>& schedules,
                  const Mutant& mutant, LaunchPlan& plan);

const std::vector<Mutant>& all_mutants();
const Mutant* find_mutant(std::string_view name);

}  // namespace clowder::plan::explore

#include "mutants.h"

#include <algorithm>

#include "plan/dependencies.h"

namespace clowder::plan::explore {
namespace {

using Waits = std::vector<Wait>;

void drop_flag(Waits& waits, FlagKind kind) {
  std::erase_if(waits, [&](const Wait& wait) { return wait.is_flag && wait.flag == kind; });
}

void drop_counter(Waits& waits, CounterKind kind) {
  std::erase_if(waits, [&](const Wait& wait) { return !wait.is_flag && wait.counter == kind; });
}

void lower_counter(Waits& waits, CounterKind kind) {
  for (Wait& wait : waits) {
    if (!wait.is_flag && wait.counter == kind) --wait.at_least;
  }
}

// An editor of waits that drops a flag of one kind of task.
template <TaskKind kTask, FlagKind kFlag>
void without_flag(const PassShape&, const RankPass&, const Task& task, Waits& waits) {
  if (task.kind() == kTask) drop_flag(waits, kFlag);
}

template <TaskKind kTask, CounterKind kCounter>
void without_counter(const PassShape&, const RankPass&, const Task& task, Waits& waits) {
  if (task.kind() == kTask) drop_counter(waits, kCounter);
}

template <TaskKind kTask, CounterKind kCounter>
void one_less(const PassShape&, const RankPass&, const Task& task, Waits& waits) {
  if (task.kind() == kTask) lower_counter(waits, kCounter);
}

void pull_takes_used_slot(const PassShape& shape, const Task& task, Waits& waits, Pass pass) {
  if (shape.pass != pass || task.kind() != TaskKind::kPull) return;
  std::erase_if(waits, [](const Wait& wait) { return !wait.is_flag; });
}

void forward_pull_takes_used_slot(const PassShape& shape, const RankPass&, const Task& task, Waits& waits) {
  pull_takes_used_slot(shape, task, waits, Pass::kForward);
}

void backward_pull_takes_used_slot(const PassShape& shape, const RankPass&, const Task& task, Waits& waits) {
  pull_takes_used_slot(shape, task, waits, Pass::kBackward);
}

void pull_waits_for_hidden_only(const PassShape& shape, const RankPass&, const Task& task, Waits& waits) {
  if (shape.pass != Pass::kBackward || task.kind() != TaskKind::kPull) return;
  for (Wait& wait : waits) {
    if (wait.is_flag) continue;
    wait.counter = CounterKind::kHidden;
    wait.index = task.block - shape.ring.ring_blocks;
    wait.at_least = shape.tiles.hidden;
  }
}

void pull_misses_a_tile(const PassShape&, const RankPass&, const Task& task, Waits& waits) {
  if (task.kind() != TaskKind::kPull) return;
  lower_counter(waits, CounterKind::kUp);
  lower_counter(waits, CounterKind::kWeight);
  lower_counter(waits, CounterKind::kHidden);
}

void done_counts_pulls_only(const PassShape&, const RankPass& rank, const Task& task, Waits& waits) {
  if (task.kind() != TaskKind::kPublishDone) return;
  for (Wait& wait : waits) wait.at_least = rank.blocks.num_blocks;
}

void weight_misses_last_block(const PassShape&, const RankPass&, const Task& task, Waits& waits) {
  if (task.kind() != TaskKind::kWeight || task.segment->num_blocks < 2) return;
  const std::int32_t last = task.block + task.segment->num_blocks - 1;
  std::erase_if(waits, [&](const Wait& wait) {
    return !wait.is_flag && wait.counter == CounterKind::kHidden && wait.index == last;
  });
}

bool is_push(const Task& task) { return task.kind() == TaskKind::kDown || task.kind() == TaskKind::kInput; }
bool is_pull(const Task& task) { return task.kind() == TaskKind::kPull; }
bool is_staging(const Task& task) { return task.kind() == TaskKind::kStageInputs; }
bool is_staging_ids(const Task& task) { return task.kind() == TaskKind::kStageIds; }
bool is_weight(const Task& task) { return task.kind() == TaskKind::kWeight; }

// As if the ring were so large that no slot is reused: no partial segments.
void emit_for_endless_ring(PassShape& shape) { shape.ring.ring_blocks = INT32_MAX / 4; }
void emit_one_block_late(PassShape& shape) { ++shape.ring.ring_blocks; }
void chunks_as_large_as_ring(PassShape& shape) { shape.ring.chunk_blocks = shape.ring.ring_blocks; }

// Moves the first rank's sums before the other math tasks of later ranks' last chunks.
void sums_before_last_pushes(const PassShape&, Queues& queues) {
  std::vector<Segment>& segments = queues.math_list.segments;
  const auto is_sum = [](const Segment& segment) {
    return segment.rank == 0 && (segment.kind == TaskKind::kOut || segment.kind == TaskKind::kInputSum);
  };
  const auto sums = std::find_if(segments.begin(), segments.end(), is_sum);
  if (sums == segments.end() || sums == segments.begin()) return;
  std::rotate(segments.begin() + (sums - segments.begin()) / 2, sums, sums + 1);
  queues.math_list.renumber();
}

// Every rank publishes its inputs only after the pulls of the ranks before it.
void staging_between_pulls(const PassShape&, Queues& queues) {
  std::vector<Segment>& segments = queues.copy_list.segments;
  const auto rank = [](const Segment& segment) { return segment.rank; };
  std::stable_sort(segments.begin(), segments.end(),
                   [&](const Segment& a, const Segment& b) { return rank(a) < rank(b); });
  queues.copy_list.renumber();
}

// Every task of this kind after the last one of that kind.
void move_behind(Queues& queues, TaskKind late, TaskKind early) {
  std::vector<Segment>& segments = queues.math_list.segments;
  const auto last = std::find_if(segments.rbegin(), segments.rend(), [&](const Segment& s) { return s.kind == early; });
  std::stable_partition(segments.begin(), last.base(), [&](const Segment& s) { return s.kind != late; });
  queues.math_list.renumber();
}

void downs_after_all_ups(const PassShape&, Queues& queues) { move_behind(queues, TaskKind::kDown, TaskKind::kUp); }
void inputs_after_all_hidden(const PassShape&, Queues& queues) {
  move_behind(queues, TaskKind::kInput, TaskKind::kHidden);
}
void recomputes_after_all_hidden(const PassShape&, Queues& queues) {
  move_behind(queues, TaskKind::kRecompute, TaskKind::kHidden);
}

void without_empty_experts(const PassShape&, Queues& queues) {
  std::erase_if(queues.math_list.segments,
                [](const Segment& segment) { return segment.kind == TaskKind::kWeight && segment.num_blocks == 0; });
  queues.math_list.renumber();
}

// Partial segments that all start at zero.
void forgotten_carry(const PassShape&, Queues& queues) {
  for (Segment& segment : queues.math_list.segments) segment.first_part = true;
}

Mutant waits_mutant(const char* name, decltype(Mutant::edit_waits) edit) {
  Mutant mutant;
  mutant.name = name;
  mutant.edit_waits = edit;
  return mutant;
}

Mutant early_mutant(const char* name, bool (*signals_at_begin)(const Task&)) {
  Mutant mutant;
  mutant.name = name;
  mutant.signals_at_begin = signals_at_begin;
  return mutant;
}

Mutant emission_mutant(const char* name, EditShape edit) {
  Mutant mutant;
  mutant.name = name;
  mutant.edit_emission = edit;
  return mutant;
}

Mutant queues_mutant(const char* name, decltype(Mutant::edit_queues) edit) {
  Mutant mutant;
  mutant.name = name;
  mutant.edit_queues = edit;
  return mutant;
}

Mutant switch_mutant(const char* name, bool Mutant::*member) {
  Mutant mutant;
  mutant.name = name;
  mutant.*member = true;
  return mutant;
}

std::vector<Mutant> copy_mutants() {
  std::vector<Mutant> mutants = {
      waits_mutant("build_skips_ids_ready", without_flag<TaskKind::kBuildSchedule, FlagKind::kIdsReady>),
      waits_mutant("pull_skips_inputs_ready", without_flag<TaskKind::kPull, FlagKind::kInputsReady>),
      waits_mutant("forward_pull_takes_used_slot", forward_pull_takes_used_slot),
      waits_mutant("backward_pull_takes_used_slot", backward_pull_takes_used_slot),
      waits_mutant("pull_waits_for_hidden_only", pull_waits_for_hidden_only),
      waits_mutant("pull_skips_hidden", without_counter<TaskKind::kPull, CounterKind::kHidden>),
      waits_mutant("pull_misses_a_tile", pull_misses_a_tile),
      waits_mutant("done_skips_remote_work", without_counter<TaskKind::kPublishDone, CounterKind::kRemoteWork>),
      waits_mutant("done_misses_one_task", one_less<TaskKind::kPublishDone, CounterKind::kRemoteWork>),
      waits_mutant("done_counts_pulls_only", done_counts_pulls_only),
      waits_mutant("finish_skips_done", without_flag<TaskKind::kFinish, FlagKind::kDone>),
      early_mutant("pull_signals_early", is_pull),
      early_mutant("push_signals_early", is_push),
      early_mutant("inputs_ready_raised_early", is_staging),
      early_mutant("ids_ready_raised_early", is_staging_ids),
      queues_mutant("staging_between_pulls", staging_between_pulls),
      switch_mutant("counters_not_cleared", &Mutant::keeps_counters),
      switch_mutant("single_ids_buffer", &Mutant::single_ids_buffer),
      switch_mutant("flags_of_old_epoch", &Mutant::accepts_old_epoch),
      switch_mutant("last_writer_ignored", &Mutant::ignores_last_writer),
  };
  return mutants;
}

std::vector<Mutant> forward_mutants() {
  return {
      waits_mutant("up_skips_pulled", without_counter<TaskKind::kUp, CounterKind::kPulled>),
      waits_mutant("up_skips_down_of_reused", without_counter<TaskKind::kUp, CounterKind::kDown>),
      waits_mutant("up_misses_a_down_tile", one_less<TaskKind::kUp, CounterKind::kDown>),
      waits_mutant("down_misses_an_up_tile", one_less<TaskKind::kDown, CounterKind::kUp>),
      waits_mutant("out_skips_done", without_flag<TaskKind::kOut, FlagKind::kDone>),
      waits_mutant("out_skips_shared_up", without_counter<TaskKind::kOut, CounterKind::kSharedUp>),
      queues_mutant("sums_before_last_pushes", sums_before_last_pushes),
      queues_mutant("downs_after_all_ups", downs_after_all_ups),
  };
}

std::vector<Mutant> backward_mutants() {
  std::vector<Mutant> mutants = {
      waits_mutant("recompute_skips_pulled", without_counter<TaskKind::kRecompute, CounterKind::kPulled>),
      waits_mutant("hidden_skips_pulled", without_counter<TaskKind::kHidden, CounterKind::kPulled>),
      waits_mutant("hidden_skips_recompute", without_counter<TaskKind::kHidden, CounterKind::kUp>),
      waits_mutant("hidden_misses_a_recompute_tile", one_less<TaskKind::kHidden, CounterKind::kUp>),
      waits_mutant("hidden_skips_input_of_reused", without_counter<TaskKind::kHidden, CounterKind::kInput>),
      waits_mutant("input_misses_a_hidden_tile", one_less<TaskKind::kInput, CounterKind::kHidden>),
      waits_mutant("weight_skips_hidden", without_counter<TaskKind::kWeight, CounterKind::kHidden>),
      waits_mutant("weight_misses_last_block", weight_misses_last_block),
      waits_mutant("weight_skips_carry", without_counter<TaskKind::kWeight, CounterKind::kCarry>),
      waits_mutant("weight_misses_a_carry", one_less<TaskKind::kWeight, CounterKind::kCarry>),
      waits_mutant("shared_weight_skips_hidden", without_counter<TaskKind::kSharedWeight, CounterKind::kSharedUp>),
      waits_mutant("input_sum_skips_shared_hidden", without_counter<TaskKind::kInputSum, CounterKind::kSharedUp>),
      waits_mutant("input_sum_skips_done", without_flag<TaskKind::kInputSum, FlagKind::kDone>),
      early_mutant("weight_signals_early", is_weight),
      emission_mutant("no_partial_weights", emit_for_endless_ring),
      emission_mutant("partial_weights_one_block_late", emit_one_block_late),
      queues_mutant("inputs_after_all_hidden", inputs_after_all_hidden),
      queues_mutant("recomputes_after_all_hidden", recomputes_after_all_hidden),
      queues_mutant("empty_experts_forgotten", without_empty_experts),
      queues_mutant("carry_forgotten", forgotten_carry),
  };
  Mutant chunks;
  chunks.name = "chunks_as_large_as_ring";
  chunks.edit_shape = chunks_as_large_as_ring;
  mutants.push_back(chunks);
  return mutants;
}

std::vector<Mutant> collect_mutants() {
  std::vector<Mutant> mutants = copy_mutants();
  for (const Mutant& mutant : forward_mutants()) mutants.push_back(mutant);
  for (const Mutant& mutant : backward_mutants()) mutants.push_back(mutant);
  return mutants;
}

class WaitCollector {
 public:
  explicit WaitCollector(Waits& waits) : waits_(waits) {}
  void counter(CounterKind kind, std::int64_t index, std::int32_t at_least) {
    waits_.push_back({false, FlagKind::kDone, kind, index, at_least});
  }
  void flags(FlagKind kind) { waits_.push_back({true, kind, CounterKind::kPulled, 0, 0}); }

 private:
  Waits& waits_;
};

}  // namespace

void list_waits(const PassShape& shape, const RankPass& rank, const Task& task, const Mutant& mutant,
                std::vector<Wait>& waits) {
  waits.clear();
  WaitCollector collector(waits);
  visit_waits(shape, rank, task, collector);
  if (mutant.edit_waits != nullptr) mutant.edit_waits(shape, rank, task, waits);
}

void build_launch(const PlanSpec& spec, const Operation& operation, const std::vector<ConstSchedule>& schedules,
                  const Mutant& mutant, LaunchPlan& plan) {
  PassShape shape = spec.pass_shape(operation);
  if (mutant.edit_shape != nullptr) mutant.edit_shape(shape);
  plan.build_layer_pass(shape, schedules, mutant.edit_emission);
  if (mutant.edit_queues != nullptr) mutant.edit_queues(shape, plan.queues());
}

const std::vector<Mutant>& all_mutants() {
  static const std::vector<Mutant> mutants = collect_mutants();
  return mutants;
}

const Mutant* find_mutant(std::string_view name) {
  for (const Mutant& mutant : all_mutants()) {
    if (name == mutant.name) return &mutant;
  }
  return nullptr;
}

}  // namespace clowder::plan::explore

// Timelines that the CPU engine records.
#include "observe/timeline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <thread>
#include <tuple>

#include "engine/cpu/launch.h"
#include "engine/layer_case.h"
#include "plan/schedule.h"

namespace clowder::test {
namespace {

constexpr double kMs = 1e6;

check::ProblemSpec layer(std::vector<std::int64_t> tokens_per_rank) {
  check::ProblemSpec spec;
  spec.tokens_per_rank = std::move(tokens_per_rank);
  spec.hidden = 256;
  spec.intermediate = 128;
  return spec;
}

void expect_no_gap(const TimelineLane& lane, const TimelinePass& pass) {
  std::int64_t last = pass.begin_ns;
  for (const TimelineEvent& event : lane) {
    // A worker's first event may begin later: its thread has to start.
    if (&event != lane.begin()) {
      EXPECT_EQ(event.begin_ns, last);
    }
    EXPECT_GE(event.begin_ns, last);
    EXPECT_GE(event.end_ns, event.begin_ns);
    EXPECT_EQ(event.role == Role::kWait, event.cause != WaitCause::kNone);
    last = event.end_ns;
  }
  EXPECT_LE(last, pass.end_ns);
}

// After a worker's last ticket the others hold one task each, so its idle end is no longer than the longest task with
// its wait. What remains is the start of threads: `slack` is two time slices of a busy machine's scheduler.
TEST(EngineTimeline, AccountsForAllTimeOfTwoWorkers) {
  check::ProblemSpec spec = layer({scaled<std::int64_t>(1500, 200)});
  Timeline timeline;
  WorkspaceOptions options;
  options.blocks = 2;
  options.ring_rows = 4096;
  options.timeline = &timeline;
  LayerCase(spec, options).step();
  ASSERT_EQ(timeline.passes().size(), 3u);
  EXPECT_EQ(timeline.num_dropped(), 0);
  for (const TimelinePass& pass : timeline.passes()) {
    std::int64_t longest = 0;
    for (const auto& lane : pass.lanes) {
      expect_no_gap(*lane, pass);
      for (const TimelineEvent& event : *lane) longest = std::max(longest, event.end_ns - event.begin_ns);
    }
    const PassSummary sums = summarise(pass);
    if (pass.pass == plan::Pass::kSchedule) {
      EXPECT_EQ(sums.math_workers, 0);
      continue;
    }
    EXPECT_EQ(sums.math_workers, 2);
    const double slack = 200 * kMs;
    EXPECT_LE(static_cast<double>(sums.idle_ns), 2 * (3 * static_cast<double>(longest) + slack));
    EXPECT_GT(sums.math_ns, 0);
    EXPECT_GT(sums.epilogue_ns, 0);
    EXPECT_GT(sums.reduce_ns, 0);
  }
}

// Every task of the plan appears once, with its rank.
TEST(EngineTimeline, HasEveryTaskOnce) {
  check::ProblemSpec spec = layer({64, 0, 33, 7});
  spec.shared_intermediate = 64;
  Timeline timeline;
  WorkspaceOptions options;
  options.blocks = 3;
  options.timeline = &timeline;
  options.saved_rows = 40;  // so that backward recomputes
  LayerCase(spec, options).step();
  std::map<std::pair<plan::Pass, plan::TaskKind>, std::set<std::tuple<int, int, int>>> seen;
  for (const TimelinePass& pass : timeline.passes()) {
    for (const auto& lane : pass.lanes) {
      for (const TimelineEvent& event : *lane) {
        if (event.role == Role::kWait || event.role == Role::kEpilogue || event.role == Role::kReduce) continue;
        const bool is_new = seen[{pass.pass, event.task}].insert({event.rank, event.block, event.tile}).second;
        // An expert's weight gradients come in segments, which may be empty: several begin at one block.
        if (event.task != plan::TaskKind::kWeight) {
          EXPECT_TRUE(is_new) << plan::to_string(event.task) << " " << event.block << " " << event.tile;
        }
      }
    }
  }
  using plan::TaskKind;
  const auto count = [&](plan::Pass pass, TaskKind kind) { return seen[{pass, kind}].size(); };
  EXPECT_EQ(count(plan::Pass::kSchedule, TaskKind::kBuildSchedule), 4u);
  EXPECT_EQ(count(plan::Pass::kForward, TaskKind::kFinish), 4u);
  EXPECT_EQ(count(plan::Pass::kForward, TaskKind::kSharedUp), 5u);  // token blocks 2 + 0 + 2 + 1
  EXPECT_EQ(count(plan::Pass::kForward, TaskKind::kOut), 5u);
  EXPECT_EQ(count(plan::Pass::kForward, TaskKind::kUp), count(plan::Pass::kForward, TaskKind::kPull));
  EXPECT_EQ(count(plan::Pass::kBackward, TaskKind::kHidden), count(plan::Pass::kForward, TaskKind::kUp));
  EXPECT_GT(count(plan::Pass::kBackward, TaskKind::kRecompute), 0u);
  EXPECT_GT(count(plan::Pass::kBackward, TaskKind::kWeight), 0u);
}

TEST(EngineTimeline, ChangesNoBit) {
  check::ProblemSpec spec = layer({50, 21});
  Timeline timeline;
  WorkspaceOptions recording;
  recording.timeline = &timeline;
  EXPECT_EQ(LayerCase(spec, recording).step(), LayerCase(spec, {}).step());
  EXPECT_GT(timeline.num_events(), 0);
}

// Tasks that take as long as they are told.
class TimedTasks : public cpu::TaskBodies {
 public:
  TimedTasks(double pull_ms, double up_ms) : pull_ms_(pull_ms), up_ms_(up_ms) {}
  void execute(const plan::Task& task, const cpu::Scratch&) override {
    if (task.kind() == plan::TaskKind::kPull) sleep(pull_ms_);
    if (task.kind() == plan::TaskKind::kUp) sleep(up_ms_);
  }

 private:
  static void sleep(double ms) { std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms)); }
  double pull_ms_;
  double up_ms_;
};

// The forward pass of one block with tasks of given lengths; each expert's rows are one row block.
PassSummary run_timed(double pull_ms, double up_ms, int num_blocks) {
  const std::int32_t experts = num_blocks;
  const plan::ScheduleShape shape{1, experts, 1, experts};
  std::vector<std::int32_t> ids, words(static_cast<std::size_t>(shape.words()));
  for (std::int32_t e = 0; e < experts; ++e) ids.push_back(e);
  const std::int32_t* ids_of_rank = ids.data();
  plan::Schedule schedule = plan::view_schedule(shape, words.data());
  plan::build_schedule(0, {&ids_of_rank, &experts}, schedule);

  plan::PassShape pass;
  pass.pass = plan::Pass::kForward;
  pass.ring = plan::make_ring(cpu::kBlockRows, std::int64_t{num_blocks} * cpu::kBlockRows, cpu::kBlockRows);
  pass.tiles.up = pass.tiles.down = 1;
  const cpu::PassPlan plan(pass, {plan::view_schedule<const std::int32_t>(shape, words.data())});

  LayerShape layer;
  layer.hidden = layer.intermediate = 32;
  layer.num_experts = experts;
  layer.topk = 1;
  layer.max_tokens = experts;
  const cpu::SymmetricLayout layout(layer, 1);
  const auto memory = make_virtual_group(1)->allocate(layout.bytes());
  cpu::ScratchPool scratch;
  scratch.reserve(1, 32);
  Timeline timeline;
  cpu::LaunchOptions options;
  options.timeline = &timeline;
  const std::vector<cpu::RankMemory> ranks = {layout.view(memory->base(0))};
  cpu::Launch launch(plan, ranks, 1, scratch, options);
  TimedTasks tasks(pull_ms, up_ms);
  launch.run(tasks);
  return summarise(timeline.passes().at(0));
}

// One copy agent brings each block in 3 ms or more, one after the other, and math has nothing else to do: all of that
// time but what a busy machine adds to math itself is exposed.
TEST(EngineTimeline, SlowCopiesAreExposed) {
  constexpr int kBlocks = 20;
  const PassSummary sums = run_timed(3.0, 0.0, kBlocks);
  EXPECT_GE(static_cast<double>(sums.copy_ns), kBlocks * 3.0 * kMs);
  const auto busy = static_cast<double>(sums.math_ns + sums.epilogue_ns + sums.reduce_ns + sums.wait_math_ns);
  EXPECT_GE(sums.exposed_ns() + busy + static_cast<double>(sums.idle_ns), kBlocks * 3.0 * kMs);
  EXPECT_GE(static_cast<double>(sums.wait_copies_ns), 0.5 * kBlocks * 3.0 * kMs);
}

// Where math takes longer, copies run ahead and hide: only the first can be waited for, and `done` at the end.
TEST(EngineTimeline, CopiesBehindSlowMathAreHidden) {
  constexpr int kBlocks = 20;
  const PassSummary sums = run_timed(0.0, 3.0, kBlocks);
  EXPECT_GE(static_cast<double>(sums.math_ns), kBlocks * 3.0 * kMs);
  EXPECT_LE(sums.exposed_ns(), 0.5 * static_cast<double>(sums.wall_ns));
}

}  // namespace
}  // namespace clowder::test

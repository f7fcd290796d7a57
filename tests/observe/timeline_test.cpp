// What timelines add up to, and the file that they become.
#include "observe/timeline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <utility>

namespace clowder {
namespace {

constexpr std::int64_t kMs = 1000000;

TimelineEvent event(Role role, double begin_ms, double end_ms, WaitCause cause = WaitCause::kNone, int rank = 0) {
  TimelineEvent result{};
  result.begin_ns = static_cast<std::int64_t>(begin_ms * kMs);
  result.end_ns = static_cast<std::int64_t>(end_ms * kMs);
  result.rank = rank;
  result.task = role == Role::kCopy ? plan::TaskKind::kPull : plan::TaskKind::kUp;
  result.role = role;
  result.cause = cause;
  return result;
}

// A pass of 10 ms on two math workers and a copy agent.
TimelinePass& ten_milliseconds(Timeline& timeline) {
  TimelinePass& pass = timeline.begin_pass(plan::Pass::kForward);
  pass.begin_ns = 0;
  pass.end_ns = 10 * kMs;
  TimelineLane& copy = pass.add_lane(WorkerKind::kCopyAgent, 0, 10);
  copy.add(event(Role::kCopy, 0, 3));
  copy.add(event(Role::kWait, 3, 7, WaitCause::kMath));
  TimelineLane& first = pass.add_lane(WorkerKind::kMathWorker, 0, 10);
  first.add(event(Role::kWait, 0, 3, WaitCause::kCopies));
  first.add(event(Role::kMath, 3, 8));
  first.add(event(Role::kEpilogue, 8, 10));
  TimelineLane& second = pass.add_lane(WorkerKind::kMathWorker, 1, 10);
  second.add(event(Role::kWait, 0.5, 2.5, WaitCause::kMath));
  second.add(event(Role::kMath, 2.5, 6));
  second.add(event(Role::kWait, 6, 7, WaitCause::kPeers));
  second.add(event(Role::kReduce, 7, 9));
  return pass;
}

TEST(PassSummary, ExposedCommunicationIsMathWaitingForCopiesAndPeers) {
  Timeline timeline;
  const PassSummary summary = summarise(ten_milliseconds(timeline));
  EXPECT_EQ(summary.math_workers, 2);
  EXPECT_EQ(summary.wall_ns, 10 * kMs);
  EXPECT_EQ(summary.wait_copies_ns, 3 * kMs);
  EXPECT_EQ(summary.wait_peers_ns, 1 * kMs);
  EXPECT_EQ(summary.exposed_ns(), 2.0 * kMs);  // (3 + 1) / 2 workers
  EXPECT_EQ(summary.wait_math_ns, 2 * kMs) << "a copy agent's waits are nobody's loss";
  EXPECT_EQ(summary.math_ns, 17 * kMs / 2);
  EXPECT_EQ(summary.epilogue_ns, 2 * kMs);
  EXPECT_EQ(summary.reduce_ns, 2 * kMs);
  EXPECT_EQ(summary.idle_ns, 3 * kMs / 2);  // the second worker's first 0.5 and last 1 ms
  EXPECT_EQ(summary.copy_ns, 3 * kMs);
}

// Whatever the events, each worker's time is one of the sums.
TEST(PassSummary, EverythingAddsUpToTheWorkersTime) {
  std::mt19937 random(7);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<std::uint32_t>(n)); };
  for (int round = 0; round < 200; ++round) {
    Timeline timeline;
    TimelinePass& pass = timeline.begin_pass(plan::Pass::kBackward);
    pass.begin_ns = below(1000);
    std::int64_t last = pass.begin_ns;
    const int workers = 1 + below(4);
    for (int i = 0; i < workers; ++i) {
      TimelineLane& lane = pass.add_lane(WorkerKind::kMathWorker, i, 64);
      std::int64_t time = pass.begin_ns + below(50);
      for (int n = below(64); n > 0; --n) {
        TimelineEvent next{};
        next.role = static_cast<Role>(1 + below(kNumRoles - 1));
        next.cause = next.role == Role::kWait ? static_cast<WaitCause>(1 + below(3)) : WaitCause::kNone;
        next.begin_ns = time;
        next.end_ns = time += below(1000);
        lane.add(next);
      }
      last = std::max(last, time);
    }
    pass.end_ns = last + below(100);
    const PassSummary sums = summarise(pass);
    EXPECT_EQ(sums.math_ns + sums.epilogue_ns + sums.reduce_ns + sums.wait_copies_ns + sums.wait_peers_ns +
                  sums.wait_math_ns + sums.idle_ns,
              workers * sums.wall_ns);
    EXPECT_GE(sums.idle_ns, 0);
    EXPECT_LE(sums.exposed_ns(), static_cast<double>(sums.wall_ns));
  }
}

TEST(PassSummary, WithoutMathWorkersNothingIsExposed) {
  Timeline timeline;
  TimelinePass& pass = timeline.begin_pass(plan::Pass::kSchedule);
  pass.end_ns = kMs;
  pass.add_lane(WorkerKind::kCopyAgent, 0, 1).add(event(Role::kCopy, 0, 1));
  EXPECT_EQ(summarise(pass).exposed_ns(), 0.0);
  EXPECT_EQ(summarise(pass).copy_ns, kMs);
}

// What plan tasks wait for is copies, peers or math, and nothing else.
TEST(WaitCauses, AreThoseOfTheDefinition) {
  for (int kind = 0; kind < plan::kNumCounterKinds; ++kind) {
    const auto counter = static_cast<plan::CounterKind>(kind);
    const WaitCause expected = counter == plan::CounterKind::kPulled       ? WaitCause::kCopies
                               : counter == plan::CounterKind::kRemoteWork ? WaitCause::kPeers
                                                                           : WaitCause::kMath;
    EXPECT_EQ(cause_of(counter), expected) << kind;
  }
  for (int kind = 0; kind < plan::kNumFlagKinds; ++kind) {
    EXPECT_EQ(cause_of(static_cast<plan::FlagKind>(kind)), WaitCause::kPeers);
  }
}

TEST(TimelineLane, CountsWhatFindsNoRoom) {
  Timeline timeline;
  TimelineLane& lane = timeline.begin_pass(plan::Pass::kForward).add_lane(WorkerKind::kMathWorker, 0, 2);
  for (int i = 0; i < 5; ++i) lane.add(event(Role::kMath, i, i + 1));
  EXPECT_EQ(timeline.num_events(), 2);
  EXPECT_EQ(timeline.num_dropped(), 3);
  EXPECT_EQ(lane.begin()->begin_ns, 0);
  timeline.clear();
  EXPECT_EQ(timeline.num_events(), 0);
}

TEST(ChromeTrace, HasAProcessForEachRankAndAThreadForEachWorkerAndRole) {
  Timeline timeline;
  TimelinePass& pass = ten_milliseconds(timeline);
  pass.lanes[1]->add(event(Role::kMath, 10, 10.0005, WaitCause::kNone, 3));
  for (const auto& lane : pass.lanes) ASSERT_EQ(lane->dropped(), 0);
  std::ostringstream text;
  write_chrome_trace(timeline, text);
  const auto json = nlohmann::json::parse(text.str());

  std::map<int, std::string> processes;
  std::map<std::pair<int, int>, std::string> threads;
  std::multimap<std::pair<int, int>, std::pair<double, double>> times;
  for (const auto& e : json["traceEvents"]) {
    const std::pair<int, int> where = {e["pid"].get<int>(), e["tid"].get<int>()};
    if (e["ph"] == "X") {
      times.insert({where, {e["ts"].get<double>(), e["dur"].get<double>()}});
      EXPECT_GE(e["dur"].get<double>(), 0.0);
    } else if (e["name"] == "process_name") {
      processes[where.first] = e["args"]["name"];
    } else if (e["name"] == "thread_name") {
      threads[where] = e["args"]["name"];
    }
  }
  EXPECT_EQ(processes, (std::map<int, std::string>{{0, "rank 0"}, {3, "rank 3"}}));
  std::multimap<std::string, std::pair<double, double>> by_name;
  for (const auto& [where, time] : times) {
    ASSERT_TRUE(threads.contains(where));
    by_name.insert({processes[where.first] + ", " + threads[where], time});
  }
  EXPECT_EQ(by_name.size(), 10u);
  const auto only = [&](const std::string& name) {
    EXPECT_EQ(by_name.count(name), 1u) << name;
    return by_name.count(name) == 1 ? by_name.find(name)->second : std::pair{-1.0, -1.0};
  };
  EXPECT_EQ(only("rank 0, copy agent 0: copy"), (std::pair{0.0, 3000.0}));
  EXPECT_EQ(only("rank 0, copy agent 0: wait"), (std::pair{3000.0, 4000.0}));
  EXPECT_EQ(only("rank 0, math worker 0: math"), (std::pair{3000.0, 5000.0}));
  EXPECT_EQ(only("rank 0, math worker 0: epilogue"), (std::pair{8000.0, 2000.0}));
  EXPECT_EQ(only("rank 0, math worker 1: reduce"), (std::pair{7000.0, 2000.0}));
  EXPECT_EQ(by_name.count("rank 0, math worker 1: wait"), 2u);
  EXPECT_EQ(only("rank 3, math worker 0: math"), (std::pair{10000.0, 0.5}));
}

TEST(ChromeTrace, OfNothingIsStillJson) {
  std::ostringstream text;
  write_chrome_trace({}, text);
  EXPECT_TRUE(nlohmann::json::parse(text.str())["traceEvents"].empty());
}

}  // namespace
}  // namespace clowder

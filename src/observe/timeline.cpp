#include "observe/timeline.h"

namespace clowder {

const char* to_string(Role role) {
  switch (role) {
    case Role::kCopy:
      return "copy";
    case Role::kWait:
      return "wait";
    case Role::kMath:
      return "math";
    case Role::kEpilogue:
      return "epilogue";
    case Role::kReduce:
      return "reduce";
  }
  return "unknown role";
}

const char* to_string(WaitCause cause) {
  switch (cause) {
    case WaitCause::kNone:
      return "nothing";
    case WaitCause::kCopies:
      return "copies";
    case WaitCause::kPeers:
      return "peers";
    case WaitCause::kMath:
      return "math";
  }
  return "unknown cause";
}

TimelinePass& Timeline::begin_pass(plan::Pass pass) {
  TimelinePass& added = passes_.emplace_back();
  added.pass = pass;
  return added;
}

std::int64_t Timeline::num_events() const {
  std::int64_t count = 0;
  for (const TimelinePass& pass : passes_) {
    for (const auto& lane : pass.lanes) count += lane->end() - lane->begin();
  }
  return count;
}

std::int64_t Timeline::num_dropped() const {
  std::int64_t count = 0;
  for (const TimelinePass& pass : passes_) {
    for (const auto& lane : pass.lanes) count += lane->dropped();
  }
  return count;
}

namespace {

std::int64_t& sum_of(PassSummary& summary, const TimelineEvent& event) {
  switch (event.role) {
    case Role::kCopy:
      return summary.copy_ns;
    case Role::kMath:
      return summary.math_ns;
    case Role::kEpilogue:
      return summary.epilogue_ns;
    case Role::kReduce:
      return summary.reduce_ns;
    case Role::kWait:
      break;
  }
  switch (event.cause) {
    case WaitCause::kCopies:
      return summary.wait_copies_ns;
    case WaitCause::kPeers:
      return summary.wait_peers_ns;
    default:
      return summary.wait_math_ns;
  }
}

void add_math_worker(const TimelineLane& lane, PassSummary& summary) {
  ++summary.math_workers;
  summary.idle_ns += summary.wall_ns;
  if (lane.begin() == lane.end()) return;
  summary.idle_ns -= (lane.end() - 1)->end_ns - lane.begin()->begin_ns;
  for (const TimelineEvent& event : lane) sum_of(summary, event) += event.end_ns - event.begin_ns;
}

}  // namespace

PassSummary summarise(const TimelinePass& pass) {
  PassSummary summary;
  summary.pass = pass.pass;
  summary.wall_ns = pass.end_ns - pass.begin_ns;
  for (const auto& lane : pass.lanes) {
    if (lane->kind() == WorkerKind::kMathWorker) {
      add_math_worker(*lane, summary);
      continue;
    }
    for (const TimelineEvent& event : *lane) {
      if (event.role == Role::kCopy) summary.copy_ns += event.end_ns - event.begin_ns;
    }
  }
  return summary;
}

}  // namespace clowder

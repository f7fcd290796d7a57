// What the threads of an engine did, and when: recorded while passes run, read afterwards.
//
// An engine adds a lane for each worker of a launch, with room for its events, before the launch starts; the worker
// then appends to its own lane, without a lock. An engine on a device fills lanes from what it recorded there. Times
// are nanoseconds of one clock that all lanes of a timeline share.
//
// **Exposed communication** is the time in which math workers waited for copies or peers: their waits whose unmet
// condition is `pulled`, a flag, or remote work. Waits for other math tasks, and the time after a worker's last task,
// are not part of it. It is the mean over the math workers of a pass, so that as a share of the pass's time it is the
// share of math that was lost.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

#include "plan/task.h"

namespace clowder {

// What a stretch of time went into.
enum class Role : std::int8_t {
  kCopy,      // moving rows and publishing flags
  kWait,      // an unmet condition
  kMath,      // products
  kEpilogue,  // activation, rounding and pushes of a tile
  kReduce,    // sums over a token's slots
};
inline constexpr int kNumRoles = static_cast<int>(Role::kReduce) + 1;

const char* to_string(Role role);

// What a wait was for.
enum class WaitCause : std::int8_t {
  kNone,    // no wait
  kCopies,  // rows that a copy agent brings
  kPeers,   // a flag of any rank, or the work that goes to peers
  kMath,    // other math tasks
};

const char* to_string(WaitCause cause);

constexpr WaitCause cause_of(plan::CounterKind kind) {
  switch (kind) {
    case plan::CounterKind::kPulled:
      return WaitCause::kCopies;
    case plan::CounterKind::kRemoteWork:
      return WaitCause::kPeers;
    default:
      return WaitCause::kMath;
  }
}
constexpr WaitCause cause_of(plan::FlagKind) { return WaitCause::kPeers; }

struct TimelineEvent {
  std::int64_t begin_ns;
  std::int64_t end_ns;
  std::int32_t rank;  // in the group
  std::int32_t block;
  std::int32_t tile;
  plan::TaskKind task;  // that ran, or that the wait was before
  Role role;
  WaitCause cause;  // of waits only
};

enum class WorkerKind : std::int8_t { kCopyAgent, kMathWorker };

// One worker's events of one pass, in the order of time.
class TimelineLane {
 public:
  TimelineLane(WorkerKind kind, int index, std::int64_t capacity)
      : kind_(kind),
        index_(index),
        capacity_(capacity),
        events_(std::make_unique_for_overwrite<TimelineEvent[]>(static_cast<std::size_t>(capacity))) {}

  void add(const TimelineEvent& event) {
    if (count_ < capacity_) {
      events_[static_cast<std::size_t>(count_++)] = event;
    } else {
      ++dropped_;
    }
  }

  WorkerKind kind() const { return kind_; }
  int index() const { return index_; }  // among the workers of its kind
  std::int64_t dropped() const { return dropped_; }
  const TimelineEvent* begin() const { return events_.get(); }
  const TimelineEvent* end() const { return events_.get() + count_; }

 private:
  WorkerKind kind_;
  int index_;
  std::int64_t capacity_;
  std::int64_t count_ = 0;
  std::int64_t dropped_ = 0;
  std::unique_ptr<TimelineEvent[]> events_;
};

// One launch. Between its beginning and its end every worker of it ran.
struct TimelinePass {
  plan::Pass pass = plan::Pass::kForward;
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  std::vector<std::unique_ptr<TimelineLane>> lanes;

  TimelineLane& add_lane(WorkerKind kind, int index, std::int64_t capacity) {
    return *lanes.emplace_back(std::make_unique<TimelineLane>(kind, index, capacity));
  }
};

class Timeline {
 public:
  // The pass that an engine is about to launch; valid until the next call.
  TimelinePass& begin_pass(plan::Pass pass);
  void clear() { passes_.clear(); }

  const std::vector<TimelinePass>& passes() const { return passes_; }
  std::int64_t num_events() const;
  // Events that found their lane full: with any, sums are too small.
  std::int64_t num_dropped() const;

 private:
  std::vector<TimelinePass> passes_;
};

// Where the time of one pass went, in nanoseconds: sums over its math workers, but for wall_ns, exposed_ns and
// copy_ns.
struct PassSummary {
  plan::Pass pass = plan::Pass::kForward;
  int math_workers = 0;
  std::int64_t wall_ns = 0;
  std::int64_t math_ns = 0;
  std::int64_t epilogue_ns = 0;
  std::int64_t reduce_ns = 0;
  std::int64_t wait_copies_ns = 0;
  std::int64_t wait_peers_ns = 0;
  std::int64_t wait_math_ns = 0;
  std::int64_t idle_ns = 0;  // before the first and after the last event of each
  std::int64_t copy_ns = 0;  // sum over copy agents

  // Mean over math workers; 0 for a pass without any.
  double exposed_ns() const {
    if (math_workers == 0) return 0.0;
    return static_cast<double>(wait_copies_ns + wait_peers_ns) / math_workers;
  }
};

PassSummary summarise(const TimelinePass& pass);

// Chrome's trace format, which Perfetto opens: a process for each rank, a thread for each worker and role, a complete
// event ("X") for each stretch, times in microseconds since the first pass began.
void write_chrome_trace(const Timeline& timeline, std::ostream& out);

}  // namespace clowder

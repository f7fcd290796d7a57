// Waits for counters and flags, with a limit. Whoever gives up says why in the launch's status, and everybody else
// leaves at the next look at it. Nothing traps.
#pragma once

#include "engine/sm90/params.h"
#include "engine/sm90/ptx.cuh"
#include "plan/dependencies.h"

namespace clowder::sm90 {

inline constexpr int kPollsPerLook = 64;

// One wait's limit. The clock is read only every kPollsPerLook polls.
class Patience {
 public:
  __device__ explicit Patience(const Watch& watch) : watch_(watch) {}

  // After a poll that failed. False: leave; `is_late()` says whether this wait was the one that ran out.
  __device__ bool goes_on() {
    __nanosleep(32);
    if (++polls_ % kPollsPerLook != 0) return true;
    if (*static_cast<const volatile std::int32_t*>(watch_.leaves) != 0) return false;
    const std::uint64_t now = nanoseconds();
    if (begin_ == 0) begin_ = now;
    is_late_ = now - begin_ > static_cast<std::uint64_t>(watch_.limit_ns);
    return !is_late_;
  }
  __device__ bool is_late() const { return is_late_; }

 private:
  const Watch& watch_;
  std::uint64_t begin_ = 0;
  std::uint32_t polls_ = 0;
  bool is_late_ = false;
};

// What a task lacks, the first thing of it.
struct Needed {
  bool is_there = true;
  bool is_flag = false;
  std::int32_t what = 0;  // plan::FlagKind or plan::CounterKind
  std::int32_t rank = 0;  // who is to bring it
};

__device__ inline void give_up(const Watch& watch, plan::Pass pass, std::int32_t rank, plan::TaskKind task,
                               const Needed& needed) {
  if (atomicCAS(watch.leaves, 0, 1) != 0) return;
  GivenUp& report = *watch.report;
  report.rank = rank;
  report.waited_for = needed.rank;
  report.pass = static_cast<std::int32_t>(pass);
  report.task = static_cast<std::int32_t>(task);
  report.is_flag = needed.is_flag ? 1 : 0;
  report.what = needed.what;
  __threadfence_system();
  *static_cast<volatile std::int32_t*>(&report.is_set) = 1;
}

// Looks once at everything that the plan names. One thread.
class InputVisitor {
 public:
  __device__ explicit InputVisitor(const ForwardRank& rank) : rank_(rank) {}

  __device__ void counter(plan::CounterKind kind, std::int64_t index, std::int32_t at_least) {
    if (!needed_.is_there || load_acquire(rank_.counters[static_cast<int>(kind)] + index) >= at_least) return;
    needed_ = {false, false, static_cast<std::int32_t>(kind), *rank_.schedule.rank};
  }

  __device__ void flags(plan::FlagKind) {
    // One rank: what a peer's flag would say, its own counter says.
    counter(plan::CounterKind::kRemoteWork, 0, rank_.pass->num_remote_tasks);
  }

  __device__ const Needed& needed() const { return needed_; }

 private:
  const ForwardRank& rank_;
  Needed needed_;
};

template <class Params>
__device__ Needed find_missing(const Params& params, const ForwardRank& rank, const plan::Task& task) {
  InputVisitor visitor(rank);
  plan::visit_waits(params.shape, *rank.pass, task, visitor);
  return visitor.needed();
}

}  // namespace clowder::sm90

// Waits for counters and flags, with a limit. Whoever gives up says why in the launch's status, and everybody else
// leaves at the next look at it. Nothing traps.
#pragma once

#include "engine/sm90/params.h"
#include "engine/sm90/ptx.cuh"
#include "engine/sm90/tiles.h"
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

struct Wait {
  std::int32_t rank;
  std::int32_t waited_for;
  plan::Pass pass;
  plan::TaskKind task;
  bool is_flag;
  std::int32_t what;  // plan::FlagKind or plan::CounterKind
};

__device__ inline void give_up(const Watch& watch, const Wait& wait) {
  if (atomicCAS(watch.leaves, 0, 1) != 0) return;
  GivenUp& report = *watch.report;
  report.rank = wait.rank;
  report.waited_for = wait.waited_for;
  report.pass = static_cast<std::int32_t>(wait.pass);
  report.task = static_cast<std::int32_t>(wait.task);
  report.is_flag = wait.is_flag ? 1 : 0;
  report.what = wait.what;
  __threadfence_system();
  *static_cast<volatile std::int32_t*>(&report.is_set) = 1;
}

// Counters of math tasks count warps: each signals on its own.
CLOWDER_HD inline std::int32_t signals_of(plan::CounterKind kind) {
  return kind == plan::CounterKind::kPulled ? 1 : kMathWarps;
}

// Waits, one after the other, for what the plan names. One thread.
template <class Params>
class InputWaiter {
 public:
  __device__ InputWaiter(const Params& params, const ForwardRank& rank, const plan::Task& task)
      : params_(params), rank_(rank), task_(task) {}

  __device__ void counter(plan::CounterKind kind, std::int64_t index, std::int32_t at_least) {
    if (!ok_) return;
    const std::int32_t* place = rank_.counters[static_cast<int>(kind)] + index;
    const std::int32_t target = at_least * signals_of(kind);
    if (load_acquire(place) >= target) return;
    Patience patience(params_.watch);
    while (load_acquire(place) < target) {
      if (patience.goes_on()) continue;
      leave(patience, *rank_.schedule.rank, false, static_cast<std::int32_t>(kind));
      return;
    }
  }

  __device__ void flags(plan::FlagKind) {
    // One rank: what a peer's flag would say, its own counter says.
    counter(plan::CounterKind::kRemoteWork, 0, rank_.pass->num_remote_tasks);
  }

  __device__ bool ok() const { return ok_; }

 private:
  __device__ void leave(const Patience& patience, std::int32_t waited_for, bool is_flag, std::int32_t what) {
    ok_ = false;
    if (!patience.is_late()) return;
    give_up(params_.watch, {*rank_.schedule.rank, waited_for, params_.shape.pass, task_.kind(), is_flag, what});
  }

  const Params& params_;
  const ForwardRank& rank_;
  const plan::Task& task_;
  bool ok_ = true;
};

template <class Params>
__device__ bool wait_for_inputs(const Params& params, const ForwardRank& rank, const plan::Task& task) {
  InputWaiter<Params> waiter(params, rank, task);
  plan::visit_waits(params.shape, *rank.pass, task, waiter);
  return waiter.ok();
}

}  // namespace clowder::sm90

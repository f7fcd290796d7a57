// The time limit of waits. A launch is stuck when no task is being executed and none has ended for `timeout`; whoever
// finds that first makes everybody leave.
#pragma once

#include <atomic>
#include <chrono>

namespace clowder {

class Watchdog {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Watchdog(double timeout_s)
      : timeout_(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s))) {
    note_progress();
  }

  void task_begins() { executing_.fetch_add(1, std::memory_order_relaxed); }
  void task_ends() {
    note_progress();
    executing_.fetch_sub(1, std::memory_order_release);
  }

  bool must_leave() const { return must_leave_.load(std::memory_order_acquire); }

  void make_all_leave() { must_leave_.store(true, std::memory_order_release); }

  // For waiters: true when this wait is over without success.
  bool expired() {
    if (must_leave()) return true;
    if (executing_.load(std::memory_order_acquire) > 0) return false;
    const Clock::duration last{last_progress_.load(std::memory_order_relaxed)};
    if (Clock::now().time_since_epoch() - last < timeout_) return false;
    make_all_leave();
    return true;
  }

 private:
  void note_progress() { last_progress_.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed); }

  Clock::duration timeout_;
  std::atomic<Clock::rep> last_progress_{0};
  std::atomic<int> executing_{0};
  std::atomic<bool> must_leave_{false};
};

}  // namespace clowder

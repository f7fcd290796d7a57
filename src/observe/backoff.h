// How a thread waits: it spins, then yields, then sleeps, so that waiters leave a busy machine's cores to workers.
#pragma once

#include <chrono>
#include <thread>

namespace clowder {

class Backoff {
 public:
  // True when the wait has become slow, so that looking at clocks costs nothing.
  bool pause() {
    constexpr int kSpins = 64;
    constexpr int kYields = 64;
    constexpr std::chrono::microseconds kSleep{50};
    if (rounds_ <= kSpins + kYields) ++rounds_;
    if (rounds_ <= kSpins) return false;
    if (rounds_ <= kSpins + kYields) {
      std::this_thread::yield();
      return false;
    }
    std::this_thread::sleep_for(kSleep);
    return true;
  }

 private:
  int rounds_ = 0;
};

}  // namespace clowder

// What killed an engine: set once, by whichever thread comes first, and told from then on.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "clowder/layer.h"

namespace clowder {

class Death {
 public:
  bool has_come() const { return has_come_.load(std::memory_order_acquire); }

  // Throws what came, with its code.
  void check() const {
    if (!has_come()) return;
    throw Error(why_->code(), std::string("the workspace is dead, make a new one on every rank: ") + why_->what());
  }

  const std::vector<WaitReport>& reports() const {
    static const std::vector<WaitReport> kNone;
    return has_come() ? reports_ : kNone;
  }

  void record(const Error& why, std::vector<WaitReport> reports = {}) {
    const std::lock_guard lock(mutex_);
    if (has_come()) return;
    why_ = why;
    reports_ = std::move(reports);
    has_come_.store(true, std::memory_order_release);
  }

 private:
  std::mutex mutex_;  // of those who record
  std::atomic<bool> has_come_{false};
  // Written before has_come_ is set, and never again.
  std::optional<Error> why_;
  std::vector<WaitReport> reports_;
};

}  // namespace clowder

// A worker's side of a timeline. Events follow each other without a gap, so that they account for all of the worker's
// time. Without a lane every call is one predictable branch, and no clock is read.
#pragma once

#include <chrono>

#include "observe/timeline.h"

namespace clowder::cpu {

inline std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

class Recorder {
 public:
  // `lane` may be null.
  explicit Recorder(TimelineLane* lane) : lane_(lane) {
    if (lane_ != nullptr) last_ns_ = now_ns();
  }

  // The worker turns to a task of `rank`.
  void begin(const plan::Task& task, int rank) {
    if (lane_ == nullptr) return;
    event_.rank = rank;
    event_.block = task.block;
    event_.tile = task.tile;
    event_.task = task.kind();
    event_.role = first_role(task.kind());
  }

  // All time since the last event went into a wait.
  void waited(WaitCause cause) {
    if (lane_ == nullptr) return;
    TimelineEvent wait = event_;
    wait.role = Role::kWait;
    wait.cause = cause;
    add(wait);
  }

  // What follows of the task is of another role.
  void turn_to(Role role) {
    if (lane_ == nullptr) return;
    add(event_);
    event_.role = role;
  }

  void end() {
    if (lane_ != nullptr) add(event_);
  }

 private:
  static Role first_role(plan::TaskKind kind) {
    switch (kind) {
      case plan::TaskKind::kStageIds:
      case plan::TaskKind::kBuildSchedule:
      case plan::TaskKind::kStageInputs:
      case plan::TaskKind::kPull:
      case plan::TaskKind::kPublishDone:
      case plan::TaskKind::kFinish:
        return Role::kCopy;
      default:
        return Role::kMath;
    }
  }

  void add(TimelineEvent event) {
    event.begin_ns = last_ns_;
    event.end_ns = last_ns_ = now_ns();
    lane_->add(event);
  }

  TimelineLane* lane_;
  std::int64_t last_ns_ = 0;
  TimelineEvent event_{};
};

}  // namespace clowder::cpu

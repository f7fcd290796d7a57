// Runs a plan on threads. A block is a pair of threads: a math worker and a copy agent. Each takes tickets of its
// queue, waits for what the plan says, does the task, and signals what the plan says.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "clowder/layer.h"
#include "engine/cpu/buffer.h"
#include "engine/cpu/pass_plan.h"
#include "engine/cpu/recorder.h"
#include "engine/cpu/symmetric_layout.h"
#include "engine/cpu/tiles.h"
#include "observe/watchdog.h"

namespace clowder::cpu {

// A worker's own memory for tiles (math workers only), and its recorder.
struct Scratch {
  float* panel = nullptr;  // [most terms of a product][kLanes]
  float* sums = nullptr;   // [kScratchSums][kLanes]
  Recorder* recorder = nullptr;
};
inline constexpr int kScratchSums = 5 * kHiddenTile;

// The scratch of all math workers, kept from launch to launch.
class ScratchPool {
 public:
  void reserve(int workers, std::int64_t panel_terms);
  Scratch of_worker(int worker) const;
  void poison() {
    for (Buffer<float>& memory : memory_) memory.poison();
  }

 private:
  std::vector<Buffer<float>> memory_;
};

// What the tasks of a pass do.
class TaskBodies {
 public:
  virtual ~TaskBodies() = default;
  virtual void execute(const plan::Task& task, const Scratch& scratch) = 0;
};

struct LaunchOptions {
  int blocks = 1;
  double timeout_s = 60.0;
  std::uint64_t jitter_seed = 0;
  Timeline* timeline = nullptr;
};

class Launch {
 public:
  // `memory` has every rank's part of the symmetric memory; `epoch` is this pass's number among its kind; `scratch` has
  // room for options.blocks workers.
  Launch(const PassPlan& plan, const std::vector<RankMemory>& memory, std::uint32_t epoch, const ScratchPool& scratch,
         const LaunchOptions& options);

  // Returns when every task has ended, or every worker has left; then reports() says why. Rethrows what a task throws.
  void run(TaskBodies& bodies);

  // One for each rank whose wait ran out of time, those that name an absent peer first. Empty: all tasks have ended.
  std::vector<WaitReport> reports() const;

 private:
  class Waiter;
  class Signaller;
  using Counter = std::atomic<std::int32_t>;
  struct Counters {
    std::unique_ptr<Counter[]> of_kind[plan::kNumCounterKinds];
    Counter& at(plan::CounterKind kind, std::int64_t index) { return of_kind[static_cast<int>(kind)][index]; }
  };

  // What a wait was for, the most telling first: tasks of a rank, and `done` of peers, mostly wait for an absent peer
  // in turn.
  enum class Blame { kPeerHasNotCome, kPeerIsNotDone, kOwnTasks };
  struct Reported {
    WaitReport report;
    Blame blame;
  };

  struct Worker {
    int number;  // among all of the launch
    TimelineLane* lane;
    Scratch scratch;
  };

  int group_rank(const plan::Task& task) const { return plan_.ranks()[static_cast<std::size_t>(task.rank())].rank; }
  // Null for each worker without a timeline.
  static std::vector<TimelineLane*> make_lanes(TimelinePass* record, WorkerKind kind, int workers,
                                               const plan::Queue& queue);
  void work(const plan::Queue& queue, std::atomic<std::int64_t>& next_ticket, const Worker& worker, TaskBodies& bodies);
  bool wait(const plan::Task& task, Recorder& recorder);
  void signal(const plan::Task& task);
  void report(const plan::Task& task, int waited_for, const std::string& condition, Blame blame);

  const PassPlan& plan_;
  const std::vector<RankMemory>& memory_;
  std::uint32_t epoch_;
  const ScratchPool& scratch_;
  LaunchOptions options_;
  std::vector<Counters> counters_;  // of each rank of the launch
  std::atomic<std::int64_t> next_math_{0};
  std::atomic<std::int64_t> next_copy_{0};
  Watchdog watchdog_;

  std::mutex mutex_;  // of what follows
  std::vector<Reported> reports_;
  std::exception_ptr failure_;
};

}  // namespace clowder::cpu

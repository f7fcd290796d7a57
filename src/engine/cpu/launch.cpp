#include "engine/cpu/launch.h"

#include <algorithm>
#include <exception>
#include <random>
#include <thread>

#include "observe/backoff.h"
#include "plan/dependencies.h"

namespace clowder::cpu {
namespace {

// Random delays around tasks, to shake interleavings.
class Jitter {
 public:
  Jitter(std::uint64_t seed, int worker)
      : is_on_(seed != 0), random_(seed + 0x9e3779b97f4a7c15u * (static_cast<std::uint64_t>(worker) + 1u)) {}

  void delay() {
    constexpr int kMostMicroseconds = 100;
    if (!is_on_ || random_() % 4 != 0) return;
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % kMostMicroseconds));
  }

 private:
  bool is_on_;
  std::mt19937_64 random_;
};

}  // namespace

// Polls one condition after the other; after the first that does not come true, ok() is false.
class Launch::Waiter {
 public:
  Waiter(Launch& launch, const plan::Task& task, Recorder& recorder)
      : launch_(launch), task_(task), recorder_(recorder) {}

  bool ok() const { return ok_; }

  void counter(plan::CounterKind kind, std::int64_t index, std::int32_t at_least) {
    if (!ok_) return;
    const Counter& counter = launch_.counters_[static_cast<std::size_t>(task_.rank())].at(kind, index);
    if (poll(cause_of(kind), [&] { return counter.load(std::memory_order_acquire) >= at_least; })) return;
    launch_.report(task_, launch_.group_rank(task_), "earlier tasks", Blame::kOwnTasks);
  }

  void flags(plan::FlagKind kind) {
    const int rank = launch_.group_rank(task_);
    const RankMemory& own = launch_.memory_[static_cast<std::size_t>(rank)];
    for (int peer = 0; peer < own.num_ranks && ok_; ++peer) {
      const auto flag = own.flag(kind, peer);
      // Epochs may wrap around: their distance says which is later.
      const auto is_raised = [&] {
        return static_cast<std::int32_t>(flag.load(std::memory_order_acquire) - launch_.epoch_) >= 0;
      };
      if (poll(cause_of(kind), is_raised)) continue;
      const Blame of_peer = kind == plan::FlagKind::kDone ? Blame::kPeerIsNotDone : Blame::kPeerHasNotCome;
      launch_.report(task_, peer, plan::to_string(kind), peer == rank ? Blame::kOwnTasks : of_peer);
    }
  }

 private:
  template <class Condition>
  bool poll(WaitCause cause, const Condition& condition) {
    if (condition()) return true;
    Backoff backoff;
    do {
      if (backoff.pause() && launch_.watchdog_.expired()) ok_ = false;
    } while (ok_ && !condition());
    recorder_.waited(cause);
    return ok_;
  }

  Launch& launch_;
  const plan::Task& task_;
  Recorder& recorder_;
  bool ok_ = true;
};

class Launch::Signaller {
 public:
  Signaller(Launch& launch, const plan::Task& task) : launch_(launch), task_(task) {}

  void counter(plan::CounterKind kind, std::int64_t index) {
    launch_.counters_[static_cast<std::size_t>(task_.rank())].at(kind, index).fetch_add(1, std::memory_order_acq_rel);
  }

  void flags(plan::FlagKind kind) {
    const int rank = launch_.group_rank(task_);
    for (const RankMemory& reader : launch_.memory_) {
      reader.flag(kind, rank).store(launch_.epoch_, std::memory_order_release);
    }
  }

 private:
  Launch& launch_;
  const plan::Task& task_;
};

void ScratchPool::reserve(int workers, std::int64_t panel_terms) {
  if (static_cast<int>(memory_.size()) < workers) memory_.resize(static_cast<std::size_t>(workers));
  for (Buffer<float>& memory : memory_) memory.reserve((kScratchSums + panel_terms) * kLanes);
}

Scratch ScratchPool::of_worker(int worker) const {
  float* memory = memory_[static_cast<std::size_t>(worker)].data();
  return {memory + kScratchSums * kLanes, memory, nullptr};
}

Launch::Launch(const PassPlan& plan, const std::vector<RankMemory>& memory, std::uint32_t epoch,
               const ScratchPool& scratch, const LaunchOptions& options)
    : plan_(plan),
      memory_(memory),
      epoch_(epoch),
      scratch_(scratch),
      options_(options),
      counters_(plan.ranks().size()),
      watchdog_(options.timeout_s) {
  for (std::size_t r = 0; r < counters_.size(); ++r) {
    for (int kind = 0; kind < plan::kNumCounterKinds; ++kind) {
      const std::int64_t count =
          plan::num_counters(plan.shape(), plan.ranks()[r], static_cast<plan::CounterKind>(kind));
      counters_[r].of_kind[kind] = std::make_unique<Counter[]>(static_cast<std::size_t>(count));
    }
  }
}

void Launch::run(TaskBodies& bodies) {
  const auto workers_of = [&](const plan::Queue& queue) {
    return static_cast<int>(std::min<std::int64_t>(options_.blocks, queue.num_tickets));
  };
  const plan::Queue math = plan_.math();
  const plan::Queue copy = plan_.copy();
  TimelinePass* record = options_.timeline == nullptr ? nullptr : &options_.timeline->begin_pass(plan_.shape().pass);
  if (record != nullptr) record->begin_ns = now_ns();
  const std::vector<TimelineLane*> copy_lanes = make_lanes(record, WorkerKind::kCopyAgent, workers_of(copy), copy);
  const std::vector<TimelineLane*> math_lanes = make_lanes(record, WorkerKind::kMathWorker, workers_of(math), math);
  std::vector<std::jthread> threads;
  try {
    for (int i = 0; i < workers_of(copy); ++i) {
      const Worker worker{i, copy_lanes[static_cast<std::size_t>(i)], Scratch{}};
      threads.emplace_back([&, worker] { work(copy, next_copy_, worker, bodies); });
    }
    for (int i = 0; i < workers_of(math); ++i) {
      const Worker worker{options_.blocks + i, math_lanes[static_cast<std::size_t>(i)], scratch_.of_worker(i)};
      threads.emplace_back([&, worker] { work(math, next_math_, worker, bodies); });
    }
  } catch (...) {  // no more threads: those that run must not wait for the others
    watchdog_.make_all_leave();
    throw;
  }
  threads.clear();  // joins
  if (record != nullptr) record->end_ns = now_ns();
  if (failure_) std::rethrow_exception(failure_);
  std::stable_sort(reports_.begin(), reports_.end(),
                   [](const Reported& a, const Reported& b) { return a.blame < b.blame; });
}

std::vector<WaitReport> Launch::reports() const {
  std::vector<WaitReport> result;
  for (const Reported& reported : reports_) result.push_back(reported.report);
  return result;
}

std::vector<TimelineLane*> Launch::make_lanes(TimelinePass* record, WorkerKind kind, int workers,
                                              const plan::Queue& queue) {
  // Room for all tasks of the queue, each with a wait, or for as many as a trace can show.
  constexpr std::int64_t kEventsPerTask = 3;
  constexpr std::int64_t kMostEvents = std::int64_t{1} << 20;
  std::vector<TimelineLane*> lanes(static_cast<std::size_t>(workers), nullptr);
  if (record == nullptr) return lanes;
  for (int i = 0; i < workers; ++i) {
    lanes[static_cast<std::size_t>(i)] =
        &record->add_lane(kind, i, std::min(kEventsPerTask * queue.num_tickets, kMostEvents));
  }
  return lanes;
}

void Launch::work(const plan::Queue& queue, std::atomic<std::int64_t>& next_ticket, const Worker& worker,
                  TaskBodies& bodies) try {
  Jitter jitter(options_.jitter_seed, worker.number);
  Recorder recorder(worker.lane);
  Scratch scratch = worker.scratch;
  scratch.recorder = &recorder;
  std::int64_t cursor = 0;
  while (true) {
    const std::int64_t ticket = next_ticket.fetch_add(1, std::memory_order_relaxed);
    if (ticket >= queue.num_tickets || watchdog_.must_leave()) return;
    const plan::Task task = plan::find_task(queue, ticket, cursor);
    recorder.begin(task, group_rank(task));
    jitter.delay();
    if (!wait(task, recorder)) return;
    watchdog_.task_begins();
    bodies.execute(task, scratch);
    jitter.delay();
    signal(task);
    watchdog_.task_ends();
    recorder.end();
  }
} catch (...) {
  watchdog_.make_all_leave();
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = std::current_exception();
}

bool Launch::wait(const plan::Task& task, Recorder& recorder) {
  Waiter waiter(*this, task, recorder);
  plan::visit_waits(plan_.shape(), plan_.ranks()[static_cast<std::size_t>(task.rank())], task, waiter);
  return waiter.ok();
}

void Launch::signal(const plan::Task& task) {
  Signaller signaller(*this, task);
  plan::visit_signals(task, signaller);
}

// Keeps one report a rank: the one that says most.
void Launch::report(const plan::Task& task, int waited_for, const std::string& condition, Blame blame) {
  const Reported reported{
      {group_rank(task), waited_for, plan::to_string(plan_.shape().pass), plan::to_string(task.kind()), condition},
      blame};
  const std::lock_guard lock(mutex_);
  const auto of_rank = std::find_if(reports_.begin(), reports_.end(),
                                    [&](const Reported& other) { return other.report.rank == reported.report.rank; });
  if (of_rank == reports_.end()) {
    reports_.push_back(reported);
  } else if (blame < of_rank->blame) {
    *of_rank = reported;
  }
}

}  // namespace clowder::cpu

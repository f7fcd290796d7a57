#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>

#include "group/group_size.h"
#include "group/local_memory.h"

namespace clowder {
namespace {

constexpr double kMostSeconds = 1e7;

// What the members of one group share. Each has a turn in every allocation; the first to come makes it.
class Meeting {
 public:
  Meeting(int size, double timeout_s) : size_(size), timeout_(timeout_s) {}

  int size() const { return size_; }

  std::shared_ptr<SymmetricMemory> allocate(int rank, std::size_t call, std::size_t bytes_per_rank) {
    std::unique_lock lock(mutex_);
    if (call == allocations_.size()) {
      allocations_.push_back({std::make_shared<LocalSymmetricMemory>(size_, bytes_per_rank), bytes_per_rank, 0});
    }
    Allocation& allocation = allocations_[call];
    if (allocation.bytes_per_rank != bytes_per_rank) {
      throw Error(ErrorCode::kArgument, "workspace: rank " + std::to_string(rank) + " asks for " +
                                            std::to_string(bytes_per_rank) + " bytes, another rank for " +
                                            std::to_string(allocation.bytes_per_rank) +
                                            "; all ranks must pass the same shape");
    }
    std::shared_ptr<SymmetricMemory> memory = allocation.memory;
    if (++allocation.arrived == size_) {
      allocation.memory.reset();  // from here on it is the members'
      all_here_.notify_all();
    }
    if (!all_here_.wait_for(lock, timeout_, [&] { return allocation.arrived == size_; })) {
      const int missing = size_ - allocation.arrived--;
      throw Error(ErrorCode::kTimeout, "rank " + std::to_string(rank) + " waited for " + std::to_string(missing) +
                                           " other ranks to create their workspace");
    }
    return memory;
  }

 private:
  struct Allocation {
    std::shared_ptr<SymmetricMemory> memory;
    std::size_t bytes_per_rank;
    int arrived;
  };

  int size_;
  std::chrono::duration<double> timeout_;
  std::mutex mutex_;
  std::condition_variable all_here_;
  std::deque<Allocation> allocations_;  // references stay valid
};

class ThreadedGroup : public Group {
 public:
  ThreadedGroup(int rank, std::shared_ptr<Meeting> meeting) : ranks_{rank}, meeting_(std::move(meeting)) {}

  int size() const override { return meeting_->size(); }
  const std::vector<int>& local_ranks() const override { return ranks_; }
  std::shared_ptr<SymmetricMemory> allocate(std::size_t bytes_per_rank) override {
    std::shared_ptr<SymmetricMemory> memory = meeting_->allocate(ranks_[0], calls_, bytes_per_rank);
    ++calls_;
    return memory;
  }

 private:
  std::vector<int> ranks_;
  std::shared_ptr<Meeting> meeting_;
  std::size_t calls_ = 0;
};

}  // namespace

std::vector<std::shared_ptr<Group>> make_threaded_groups(int size, double timeout_s) {
  check_group_size(size);
  if (!(timeout_s > 0.0 && timeout_s <= kMostSeconds)) {
    throw Error(ErrorCode::kArgument, "timeout_s: " + std::to_string(timeout_s) + ", must be above 0 and at most 1e7");
  }
  const auto meeting = std::make_shared<Meeting>(size, timeout_s);
  std::vector<std::shared_ptr<Group>> groups;
  for (int rank = 0; rank < size; ++rank) groups.push_back(std::make_shared<ThreadedGroup>(rank, meeting));
  return groups;
}

}  // namespace clowder

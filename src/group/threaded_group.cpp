#include <chrono>
#include <condition_variable>
#include <mutex>

#include "group/group_size.h"
#include "group/local_memory.h"

namespace clowder {
namespace {

// What the members of one group share: an allocation is made by its first caller and handed out once all have come.
class Meeting {
 public:
  Meeting(int size, double timeout_s) : size_(size), timeout_(timeout_s) {}

  int size() const { return size_; }

  std::shared_ptr<SymmetricMemory> allocate(int rank, std::size_t call, std::size_t bytes_per_rank) {
    std::unique_lock lock(mutex_);
    if (call == allocations_.size()) {
      allocations_.push_back({std::make_shared<LocalSymmetricMemory>(size_, bytes_per_rank), bytes_per_rank, 0});
    }
    if (allocations_[call].bytes_per_rank != bytes_per_rank) {
      throw Error(ErrorCode::kArgument, "workspace: rank " + std::to_string(rank) + " asks for " +
                                            std::to_string(bytes_per_rank) + " bytes, another rank for " +
                                            std::to_string(allocations_[call].bytes_per_rank) +
                                            "; all ranks must pass the same shape");
    }
    ++allocations_[call].arrived;
    all_here_.notify_all();
    const bool complete = all_here_.wait_for(lock, timeout_, [&] { return allocations_[call].arrived == size_; });
    if (!complete) {
      throw Error(ErrorCode::kTimeout, "rank " + std::to_string(rank) + " waited for " +
                                           std::to_string(size_ - allocations_[call].arrived) +
                                           " other ranks to create their workspace");
    }
    return allocations_[call].memory;
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
  std::vector<Allocation> allocations_;
};

class ThreadedGroup : public Group {
 public:
  ThreadedGroup(int rank, std::shared_ptr<Meeting> meeting) : ranks_{rank}, meeting_(std::move(meeting)) {}

  int size() const override { return meeting_->size(); }
  const std::vector<int>& local_ranks() const override { return ranks_; }
  std::shared_ptr<SymmetricMemory> allocate(std::size_t bytes_per_rank) override {
    return meeting_->allocate(ranks_[0], calls_++, bytes_per_rank);
  }

 private:
  std::vector<int> ranks_;
  std::shared_ptr<Meeting> meeting_;
  std::size_t calls_ = 0;
};

}  // namespace

std::vector<std::shared_ptr<Group>> make_threaded_groups(int size, double timeout_s) {
  check_group_size(size);
  const auto meeting = std::make_shared<Meeting>(size, timeout_s);
  std::vector<std::shared_ptr<Group>> groups;
  for (int rank = 0; rank < size; ++rank) groups.push_back(std::make_shared<ThreadedGroup>(rank, meeting));
  return groups;
}

}  // namespace clowder

#include <numeric>

#include "group/group_size.h"
#include "group/local_memory.h"

namespace clowder {
namespace {

class VirtualGroup : public Group {
 public:
  explicit VirtualGroup(int size) : ranks_(static_cast<std::size_t>(size)) {
    std::iota(ranks_.begin(), ranks_.end(), 0);
  }

  int size() const override { return static_cast<int>(ranks_.size()); }
  const std::vector<int>& local_ranks() const override { return ranks_; }
  std::shared_ptr<SymmetricMemory> allocate(std::size_t bytes_per_rank) override {
    return std::make_shared<LocalSymmetricMemory>(size(), bytes_per_rank);
  }

 private:
  std::vector<int> ranks_;
};

}  // namespace

std::shared_ptr<Group> make_virtual_group(int size) {
  check_group_size(size);
  return std::make_shared<VirtualGroup>(size);
}

}  // namespace clowder

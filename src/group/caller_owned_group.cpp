#include <cstdint>

#include "clowder/group.h"
#include "group/group_size.h"

namespace clowder {
namespace {

constexpr std::uintptr_t kAlignment = 256;

class CallerOwnedMemory : public SymmetricMemory {
 public:
  explicit CallerOwnedMemory(std::vector<std::byte*> bases) : bases_(std::move(bases)) {}
  std::byte* base(int rank) const override { return bases_[static_cast<std::size_t>(rank)]; }

 private:
  std::vector<std::byte*> bases_;
};

class CallerOwnedGroup : public Group {
 public:
  CallerOwnedGroup(int rank, std::vector<std::byte*> bases, std::size_t bytes_per_rank)
      : ranks_{rank}, bases_(std::move(bases)), bytes_per_rank_(bytes_per_rank) {}

  int size() const override { return static_cast<int>(bases_.size()); }
  const std::vector<int>& local_ranks() const override { return ranks_; }

  std::shared_ptr<SymmetricMemory> allocate(std::size_t bytes_per_rank) override {
    if (is_taken_)
      throw Error(ErrorCode::kArgument, "group: its memory serves a workspace already, must be a group of its own");
    if (bytes_per_rank > bytes_per_rank_) {
      throw Error(ErrorCode::kArgument, "bytes_per_rank: " + std::to_string(bytes_per_rank_) + ", must be at least " +
                                            std::to_string(bytes_per_rank) + " for this workspace");
    }
    is_taken_ = true;
    return std::make_shared<CallerOwnedMemory>(bases_);
  }

 private:
  std::vector<int> ranks_;
  std::vector<std::byte*> bases_;
  std::size_t bytes_per_rank_;
  bool is_taken_ = false;
};

}  // namespace

std::shared_ptr<Group> make_caller_owned_group(int rank, std::vector<std::byte*> bases, std::size_t bytes_per_rank) {
  const int size = static_cast<int>(bases.size());
  check_group_size(size);
  if (rank < 0 || rank >= size) {
    throw Error(ErrorCode::kArgument,
                "rank: " + std::to_string(rank) + ", must be in [0, " + std::to_string(size) + ")");
  }
  for (int r = 0; r < size; ++r) {
    const std::byte* base = bases[static_cast<std::size_t>(r)];
    if (base == nullptr || reinterpret_cast<std::uintptr_t>(base) % kAlignment != 0) {
      throw Error(ErrorCode::kArgument,
                  "bases[" + std::to_string(r) +
                      "]: " + (base == nullptr ? "a null pointer" : "memory that is not aligned") +
                      ", must be mapped memory aligned to " + std::to_string(kAlignment) + " bytes");
    }
  }
  return std::make_shared<CallerOwnedGroup>(rank, std::move(bases), bytes_per_rank);
}

}  // namespace clowder

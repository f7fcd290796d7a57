// The symmetric memory of ranks that share one address space.
#pragma once

#include "clowder/group.h"
#include "group/aligned_memory.h"

namespace clowder {

class LocalSymmetricMemory : public SymmetricMemory {
 public:
  LocalSymmetricMemory(int ranks, std::size_t bytes_per_rank)
      : stride_(round_up(bytes_per_rank, kPageBytes)),
        memory_(allocate_zeroed(stride_ * static_cast<std::size_t>(ranks))) {}

  std::byte* base(int rank) const override { return memory_.get() + stride_ * static_cast<std::size_t>(rank); }

 private:
  std::size_t stride_;
  AlignedMemory memory_;
};

}  // namespace clowder

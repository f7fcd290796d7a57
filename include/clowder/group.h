// Expert-parallel groups: each rank gets every peer's base pointer of one symmetric allocation, all an engine needs.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "clowder/export.h"

namespace clowder {

// One allocation of equal size on every rank, zeroed when it is created, aligned to at least 256 bytes.
class CLOWDER_API SymmetricMemory {
 public:
  virtual ~SymmetricMemory();
  // Base pointer of `rank`'s part, valid in this process.
  virtual std::byte* base(int rank) const = 0;
};

// A view of an EP group from some of its ranks: those that this process (and this object) drives. The members of a
// group may be driven from one object, or each from its own thread or process.
class CLOWDER_API Group {
 public:
  virtual ~Group();
  virtual int size() const = 0;
  // The ranks that a launch of this object runs, ascending.
  virtual const std::vector<int>& local_ranks() const = 0;
  // Collective over the group: the k-th call of every member gets the same memory. Returns after a host barrier.
  virtual std::shared_ptr<SymmetricMemory> allocate(std::size_t bytes_per_rank) = 0;
};

// `size` ranks in this process, all driven from one object: the full cross-rank protocol in one launch.
CLOWDER_API std::shared_ptr<Group> make_virtual_group(int size);

// The same ranks, each driven by an object of its own, from threads that advance independently, as processes do.
// `timeout_s` limits the host barrier at creation.
CLOWDER_API std::vector<std::shared_ptr<Group>> make_threaded_groups(int size, double timeout_s);

// Memory that the caller has allocated and mapped: `bases[r]` is rank r's zeroed part, aligned to at least 256 bytes,
// of `bytes_per_rank` >= Workspace::symmetric_bytes(shape, ranks). It serves one workspace of this rank. The caller
// passes a host barrier over the group between zeroing it and the first call, and another one between every rank's last
// call, also one that failed, and freeing it.
CLOWDER_API std::shared_ptr<Group> make_caller_owned_group(int rank, std::vector<std::byte*> bases,
                                                           std::size_t bytes_per_rank);

}  // namespace clowder

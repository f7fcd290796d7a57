// The records of a block as its roles walk over them.
#pragma once

#include "engine/sm90/params.h"
#include "engine/sm90/shared_memory.cuh"

namespace clowder::sm90 {

// A whole record at once.
__device__ __forceinline__ TaskRecord read_record(const SharedAddresses& shared, std::uint32_t index) {
  const uint4 a = load_shared_16(shared.record(index));
  const uint4 b = load_shared_16(shared.record(index) + 16);
  TaskRecord record;
  record.kind = a.x;
  record.rank_and_flags = a.y;
  record.expert = a.z;
  record.block = a.w;
  record.tile = b.x;
  record.first_row = b.y;
  record.row_count = b.z;
  record.ring_row = b.w;
  return record;
}

// A role's walk over the records of its block.
class RecordReader {
 public:
  __device__ RecordReader(const SharedMemory& memory, const SharedAddresses& shared)
      : memory_(memory), shared_(shared), place_(0) {}

  __device__ bool is_published() const {
    return barrier_try_wait_cluster(shared_.published(place_.index()), place_.parity());
  }
  __device__ void wait() const {
    while (!is_published()) {
    }
  }
  __device__ const TaskRecord& record() const { return memory_.records[place_.index()]; }
  __device__ std::uint32_t index() const { return place_.index(); }
  __device__ std::uint32_t parity() const { return place_.parity(); }
  __device__ void advance() { place_.advance(); }

 private:
  const SharedMemory& memory_;
  const SharedAddresses& shared_;
  RingPlace<kRecords> place_;
};

// This role, by one thread of it, needs record `index` no more.
__device__ __forceinline__ void release_record(const SharedAddresses& shared, std::uint32_t index) {
  barrier_arrive_at(shared.drained(index), 0);
}

}  // namespace clowder::sm90

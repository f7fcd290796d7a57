// How a block writes its part of the timeline.
#pragma once

#include "engine/sm90/ptx.cuh"
#include "engine/sm90/shared_memory.cuh"
#include "engine/sm90/timeline.h"

namespace clowder::sm90 {

__device__ __forceinline__ std::int64_t cycles() { return clock64(); }

__device__ __forceinline__ void mark_block(const DeviceTimeline& timeline, int moment) {
  if (timeline.events == nullptr) return;
  std::int64_t* clocks = timeline.clocks + 4 * blockIdx.x + 2 * moment;
  clocks[0] = static_cast<std::int64_t>(nanoseconds());
  clocks[1] = cycles();
}

__device__ __forceinline__ TileEvent* first_event(const DeviceTimeline& timeline) {
  return timeline.events == nullptr ? nullptr : timeline.events + std::int64_t{blockIdx.x} * timeline.capacity;
}

// The first math thread's marks on the event of the task at hand, which stands in shared memory: math warps have no
// registers to spare. Null: nobody asked.
class TileMarks {
 public:
  __device__ explicit TileMarks(SharedMemory& memory) : memory_(memory) {}

  __device__ __forceinline__ void mark(std::int64_t TileEvent::*moment) const {
    if (TileEvent* event = memory_.event; event != nullptr && writes()) event->*moment = cycles();
  }
  __device__ __forceinline__ void end(const DeviceTimeline& timeline, const TaskRecord& record) const {
    TileEvent* event = memory_.event;
    if (event == nullptr || !writes()) return;
    event->ends = cycles();
    event->kind = record.kind;
    event->rank = record.rank();
    event->block = record.block;
    event->tile = record.tile;
    if (event + 1 < first_event(timeline) + timeline.capacity) memory_.event = event + 1;
  }

 private:
  // The first math thread.
  static __device__ bool writes() { return threadIdx.x == kWarpgroupThreads; }

  SharedMemory& memory_;
};

}  // namespace clowder::sm90

// Telling others that a tile's results are there. Math warps say so within their block, which costs them nothing; the
// feed warp passes it on to the device, which takes a fence of a microsecond.
#pragma once

#include "engine/sm90/records.cuh"
#include "plan/dependencies.h"

namespace clowder::sm90 {

__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ void add_relaxed(std::int32_t* address) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(address) : "memory");
}

template <class Params>
class Signaller {
 public:
  __device__ Signaller(const Params& params, const SharedMemory& memory, const SharedAddresses& shared, int lane)
      : params_(params), shared_(shared), reader_(memory, shared), lane_(lane) {}

  // Until the feed says to leave. The whole warp.
  __device__ void run() {
    for (;;) {
      reader_.wait();
      if (reader_.record().kind == TaskRecord::kLeave) return;
      while (!poll()) {
      }
    }
  }

  // Passes on the next task, if its results are stored. The whole warp; the task has been published.
  __device__ bool poll() {
    if (!__all_sync(~0u, barrier_try_wait(shared_.stored(reader_.index()), reader_.parity()))) return false;
    if (lane_ == 0) {
      const TaskRecord& record = reader_.record();
      if (record.is_real()) signal(record);
      release_record(shared_, reader_.index());
    }
    __syncwarp();
    reader_.advance();
    return true;
  }

 private:
  // plan::visit_signals, as far as a GPU has counters.
  __device__ void signal(const TaskRecord& record) const {
    std::int32_t* const* counters = params_.rank(record.rank()).counters;
    fence_device();
    switch (record.task_kind()) {
      case plan::TaskKind::kUp:
        add_relaxed(counters[static_cast<int>(plan::CounterKind::kUp)] + record.block);
        break;
      case plan::TaskKind::kSharedUp:
        add_relaxed(counters[static_cast<int>(plan::CounterKind::kSharedUp)] + record.block);
        break;
      case plan::TaskKind::kDown:
        add_relaxed(counters[static_cast<int>(plan::CounterKind::kDown)] + record.block);
        add_relaxed(counters[static_cast<int>(plan::CounterKind::kRemoteWork)]);
        break;
      default:
        break;
    }
  }

  const Params& params_;
  SharedAddresses shared_;
  RecordReader reader_;
  int lane_;
};

}  // namespace clowder::sm90

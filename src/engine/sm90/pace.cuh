// Clusters that walk the same weights drift apart, and then read them from memory again and again. A cluster that is
// ahead of the others' average waits a little. It is a hint: a wait ends soon whatever the others do, and nothing else
// depends on it.
#pragma once

#include "engine/sm90/ptx.cuh"
#include "engine/sm90/tiles.h"

namespace clowder::sm90 {

class Pacer {
 public:
  // `progress` counts the strides of all clusters.
  __device__ Pacer(std::int32_t* progress, std::int32_t num_clusters)
      : progress_(progress), num_clusters_(num_clusters) {}

  // After each step of every tile. One thread of each cluster.
  __device__ __forceinline__ void step(bool may_wait) {
    if (++steps_ == kPaceStride - kPaceLookAhead) seen_ = look();
    if (steps_ < kPaceStride) return;
    steps_ = 0;
    ++strides_;
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(progress_) : "memory");
    for (int polls = 0; may_wait && is_ahead() && polls < kPacePolls; ++polls) seen_ = look();
    // Whoever is still ahead stops counting on those who do not move.
    if (is_ahead()) strides_ = seen_ / num_clusters_ + kPaceLead;
  }

 private:
  __device__ __forceinline__ std::int32_t look() const { return *static_cast<const volatile std::int32_t*>(progress_); }
  __device__ __forceinline__ bool is_ahead() const { return seen_ < (strides_ - kPaceLead) * num_clusters_; }

  std::int32_t* progress_;
  std::int32_t num_clusters_;
  std::int32_t steps_ = 0;
  std::int32_t strides_ = 0;
  std::int32_t seen_ = 0;
};

}  // namespace clowder::sm90

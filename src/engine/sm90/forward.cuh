// The forward pass of a layer in one kernel. The story of a block:
//
// Two blocks are a cluster. The leader's feed warp takes tickets and publishes their tasks to both (feed.cuh). In each
// block the load warp brings operands into four stages (load.cuh), the agents gather rows of x (gather.cuh), two math
// warpgroups multiply, sum slots, and store results behind the next tile (math.cuh, drain.cuh), and the feed warp tells
// others that they are there (signal.cuh). All leave when the feed says so, and no block before its partner.
#pragma once

#include "engine/sm90/feed.cuh"
#include "engine/sm90/gather.cuh"
#include "engine/sm90/load.cuh"
#include "engine/sm90/math.cuh"
#include "engine/sm90/params.h"
#include "engine/sm90/timeline.cuh"

namespace clowder::sm90 {

__device__ __forceinline__ void init_barriers(const SharedAddresses& shared) {
  for (int s = 0; s < kStages; ++s) {
    barrier_init(shared.full(s), 1 + kAgentThreads);
    barrier_init(shared.empty(s), kMathWarps * kClusterBlocks);
  }
  for (int i = 0; i < kRecords; ++i) {
    barrier_init(shared.published(i), 1);
    barrier_init(shared.targeted(i), kAgentWarps);
    barrier_init(shared.stored(i), kMathWarps);
    // By the load warp, the agents, and the feed warp for the math warps.
    barrier_init(shared.drained(i), kClusterBlocks * (1 + kAgentWarps + 1));
  }
  fence_barrier_init();
}

template <class Params, class GatedActivation>
__global__ void __cluster_dims__(kClusterBlocks, 1, 1) __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ Params params, const GatedActivation activation) {
  extern __shared__ __align__(1024) std::byte dynamic_shared[];
  SharedMemory& memory = *reinterpret_cast<SharedMemory*>(dynamic_shared);
  const SharedAddresses shared{shared_address(dynamic_shared)};
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    init_barriers(shared);
    memory.event = first_event(params.timeline);
    mark_block(params.timeline, 0);
  }
  cluster_sync();

  if (warp < kWarpgroupThreads / 32) {
    lower_registers<kOtherRegisters>();
    if (warp == kLoadWarp) {
      if (lane == 0) Loader<Params>(params, memory, shared).run();
    } else if (warp == kFeedWarp) {
      if (cluster_rank() == 0) {
        Feed<Params>(params, memory, shared, lane).run();
      } else {
        Signaller<Params>(params, memory, shared, lane).run();
      }
    } else {
      Gatherer<Params>(params, memory, shared, warp - kFirstAgentWarp, lane).run();
    }
  } else {
    raise_registers<kMathRegisters>();
    MathWarp<Params, GatedActivation>(params, memory, shared, activation).run();
  }
  __syncwarp();
  cluster_sync();
  if (threadIdx.x == 0) mark_block(params.timeline, 1);
}

}  // namespace clowder::sm90

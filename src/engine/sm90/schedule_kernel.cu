#include <cuda_runtime.h>

#include <cub/block/block_scan.cuh>

#include "engine/sm90/schedule_kernel.h"
#include "model/canonical_order.h"

namespace clowder::sm90 {
namespace {

constexpr int kCountThreads = 512;
constexpr int kPlaceThreads = 1024;
constexpr int kPlaceWarps = 16;  // that place; all threads sum

__device__ const RankIds& ids_of(const ScheduleParams& params, int rank) {
  return params.shape.num_ranks == 1 ? params.own_ids : params.ids[rank];
}
__device__ std::int32_t tokens_of(const RankIds& ids) { return ids.tokens == nullptr ? ids.num_tokens : *ids.tokens; }

__device__ std::int32_t load_id(const RankIds& ids, std::int64_t slot) {
  if (ids.is_int64 == 0) return static_cast<const std::int32_t*>(ids.topk_idx)[slot];
  const std::int64_t id = static_cast<const std::int64_t*>(ids.topk_idx)[slot];
  // Ids beyond 32 bits are as bad as any other.
  return id == static_cast<std::int32_t>(id) ? static_cast<std::int32_t>(id) : -2;
}

// The global batch as every block sees it: where each rank's tokens begin.
struct Batch {
  std::int64_t num_tokens;
  std::int64_t positions_per_tile;
  const std::int64_t* first_token;  // [R + 1], in shared memory

  // The slots of a tile in canonical order are [begin, end).
  __device__ std::int64_t slot_begin(int tile, int topk) const {
    return min(tile * positions_per_tile, canonical_positions(num_tokens)) * topk;
  }
};

__device__ Batch read_batch(const ScheduleParams& params, std::int64_t* first_token) {
  if (threadIdx.x == 0) {
    first_token[0] = 0;
    for (int r = 0; r < params.shape.num_ranks; ++r) {
      first_token[r + 1] = first_token[r] + tokens_of(ids_of(params, r));
    }
  }
  __syncthreads();
  const std::int64_t tokens = first_token[params.shape.num_ranks];
  return {tokens, (canonical_positions(tokens) + kScheduleTiles - 1) / kScheduleTiles, first_token};
}

struct Slot {
  std::int32_t rank = -1;  // -1: there is none at this place
  std::int32_t index = 0;  // token * K + slot of the rank
  std::int32_t id = -1;
};

// The slot at place `i` of the canonical order.
__device__ Slot load_slot(const ScheduleParams& params, const Batch& batch, std::int64_t i) {
  Slot slot;
  const std::int64_t token = canonical_token(i / params.shape.topk, batch.num_tokens);
  if (token >= batch.num_tokens) return slot;
  int low = 0;
  int high = params.shape.num_ranks;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (batch.first_token[middle] <= token) {
      low = middle;
    } else {
      high = middle;
    }
  }
  slot.rank = low;
  slot.index = static_cast<std::int32_t>((token - batch.first_token[low]) * params.shape.topk + i % params.shape.topk);
  slot.id = load_id(ids_of(params, low), slot.index);
  return slot;
}

__global__ void __launch_bounds__(kCountThreads) count_kernel(const ScheduleParams params) {
  extern __shared__ std::int32_t counts[];  // [E + 1]
  std::int64_t* first_token = reinterpret_cast<std::int64_t*>(counts + (params.shape.num_experts + 2) / 2 * 2);
  const int num_counts = params.shape.num_experts + 1;
  for (int e = threadIdx.x; e < num_counts; e += kCountThreads) counts[e] = 0;
  const Batch batch = read_batch(params, first_token);
  const std::int64_t end = batch.slot_begin(static_cast<int>(blockIdx.x) + 1, params.shape.topk);
  for (std::int64_t i = batch.slot_begin(blockIdx.x, params.shape.topk) + threadIdx.x; i < end; i += kCountThreads) {
    const Slot slot = load_slot(params, batch, i);
    if (plan::is_expert(slot.id, params.shape.num_experts)) {
      atomicAdd(&counts[slot.id], 1);
    } else if (slot.id != -1) {
      atomicAdd(&counts[params.shape.num_experts], 1);
    }
  }
  __syncthreads();
  std::int32_t* row = params.histogram + std::int64_t{blockIdx.x} * num_counts;
  for (int e = threadIdx.x; e < num_counts; e += kCountThreads) row[e] = counts[e];
}

// Shared memory of the kernel that places: what each warp has placed of every local expert, and sums on the way there.
struct PlaceShared {
  std::int32_t* cursors;      // [kPlaceWarps][E_l]: next row of an expert for a warp
  std::int32_t* before;       // [E_l] slots in tiles before this one
  std::int32_t* total;        // [E_l] slots in all tiles
  std::int64_t* first_token;  // [R + 1]
};

__host__ __device__ inline std::int64_t place_words(const plan::ScheduleShape& shape) {
  return (kPlaceWarps + 2) * std::int64_t{shape.experts_per_rank()} + 1;
}

__device__ PlaceShared lay_out(std::int32_t* memory, const plan::ScheduleShape& shape) {
  const int experts = shape.experts_per_rank();
  PlaceShared shared;
  shared.cursors = memory;
  shared.before = shared.cursors + kPlaceWarps * experts;
  shared.total = shared.before + experts;
  shared.first_token = reinterpret_cast<std::int64_t*>(memory + (place_words(shape) + 1) / 2 * 2);
  return shared;
}

// Sums the tiles' histograms of the local experts, each expert by several threads.
__device__ void sum_tiles(const ScheduleParams& params, int first_expert, const PlaceShared& shared) {
  const int experts = params.shape.experts_per_rank();
  for (int e = threadIdx.x; e < experts; e += kPlaceThreads) shared.before[e] = shared.total[e] = 0;
  __syncthreads();
  const std::int64_t stride = params.shape.num_experts + 1;
  const int groups = max(1, kPlaceThreads / experts);
  const int group = static_cast<int>(threadIdx.x) / experts;
  for (int e = static_cast<int>(threadIdx.x) % experts; e < experts && group < groups; e += kPlaceThreads) {
    std::int32_t before = 0;
    std::int32_t total = 0;
#pragma unroll 8
    for (int tile = group; tile < kScheduleTiles; tile += groups) {
      const std::int32_t count = params.histogram[tile * stride + first_expert + e];
      before += tile < static_cast<int>(blockIdx.x) ? count : 0;
      total += count;
    }
    atomicAdd(&shared.before[e], before);
    atomicAdd(&shared.total[e], total);
  }
  __syncthreads();
}

// From counts to the first row that this tile places of each expert; `total` becomes the expert's first row.
__device__ void place_experts(const plan::ScheduleShape& shape, const PlaceShared& shared, plan::Schedule& schedule) {
  using Scan = cub::BlockScan<std::int32_t, kPlaceThreads>;
  __shared__ typename Scan::TempStorage scan;
  const int experts = shape.experts_per_rank();
  std::int32_t rows = 0;
  for (int first = 0; first < experts; first += kPlaceThreads) {
    const int e = first + static_cast<int>(threadIdx.x);
    const std::int32_t count = e < experts ? shared.total[e] : 0;
    std::int32_t begin = 0;
    std::int32_t sum = 0;
    Scan(scan).ExclusiveSum(count, begin, sum);
    if (e < experts) {
      shared.total[e] = rows + begin;
      shared.before[e] += rows + begin;
      if (blockIdx.x == 0) schedule.expert_row_begin[e] = rows + begin;
    }
    rows += sum;
    __syncthreads();
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) schedule.expert_row_begin[experts] = rows;
}

// A warp's run of the tile's slots, whole rounds of 32.
struct Run {
  std::int64_t begin, end;
};
__device__ Run run_of(const Batch& batch, int topk, int warp) {
  const std::int64_t begin = batch.slot_begin(blockIdx.x, topk);
  const std::int64_t end = batch.slot_begin(static_cast<int>(blockIdx.x) + 1, topk);
  const std::int64_t length = ((end - begin + kPlaceWarps - 1) / kPlaceWarps + 31) / 32 * 32;
  return {min(end, begin + warp * length), min(end, begin + (warp + 1) * length)};
}

__device__ void count_runs(const ScheduleParams& params, const Batch& batch, int first_expert,
                           const PlaceShared& shared) {
  const int experts = params.shape.experts_per_rank();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  for (int i = threadIdx.x; i < kPlaceWarps * experts; i += kPlaceThreads) shared.cursors[i] = 0;
  __syncthreads();
  if (warp < kPlaceWarps) {
    const Run run = run_of(batch, params.shape.topk, warp);
    for (std::int64_t i = run.begin + threadIdx.x % 32; i < run.end; i += 32) {
      const std::int32_t e = load_slot(params, batch, i).id - first_expert;
      if (e >= 0 && e < experts) atomicAdd(&shared.cursors[warp * experts + e], 1);
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += kPlaceThreads) {
    std::int32_t row = shared.before[e];
    for (int w = 0; w < kPlaceWarps; ++w) {
      const std::int32_t count = shared.cursors[w * experts + e];
      shared.cursors[w * experts + e] = row;
      row += count;
    }
  }
  __syncthreads();
}

__device__ void place_runs(const ScheduleParams& params, const Batch& batch, int first_expert,
                           const PlaceShared& shared, plan::Schedule& schedule) {
  const int experts = params.shape.experts_per_rank();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (warp >= kPlaceWarps) return;
  std::int32_t* cursors = shared.cursors + warp * experts;
  const Run run = run_of(batch, params.shape.topk, warp);
  for (std::int64_t first = run.begin; first < run.end; first += 32) {
    const Slot slot = first + lane < run.end ? load_slot(params, batch, first + lane) : Slot{};
    const std::int32_t e = slot.id - first_expert;
    const bool is_local = slot.rank >= 0 && e >= 0 && e < experts;
    const unsigned same = __match_any_sync(~0u, is_local ? e : -1);
    const int rank = __popc(same & ((1u << lane) - 1));
    if (is_local) {
      schedule.row_source[cursors[e] + rank] =
          static_cast<std::int32_t>(slot.rank * params.shape.slots_per_rank() + slot.index);
    }
    __syncwarp();
    if (is_local && rank == 0) cursors[e] += __popc(same);
    __syncwarp();
  }
}

__device__ void write_route_masks(const ScheduleParams& params, int rank, std::int32_t tokens,
                                  plan::Schedule& schedule) {
  const RankIds& ids = ids_of(params, rank);
  const int stride = static_cast<int>(gridDim.x) * kPlaceThreads;
  for (std::int32_t t = static_cast<std::int32_t>(blockIdx.x * kPlaceThreads + threadIdx.x); t < tokens; t += stride) {
    std::int32_t mask = 0;
    for (int k = 0; k < params.shape.topk; ++k) {
      const std::int32_t id = load_id(ids, std::int64_t{t} * params.shape.topk + k);
      if (plan::is_expert(id, params.shape.num_experts)) mask |= 1 << k;
    }
    schedule.route_mask[t] = mask;
  }
}

// What a schedule says of the whole group. One block.
__device__ void write_summary(const ScheduleParams& params, int rank, const Batch& batch, plan::Schedule& schedule) {
  const std::int64_t stride = params.shape.num_experts + 1;
  for (int e = threadIdx.x; e < stride; e += kPlaceThreads) {
    std::int32_t total = 0;
#pragma unroll 8
    for (int tile = 0; tile < kScheduleTiles; ++tile) total += params.histogram[tile * stride + e];
    if (e < params.shape.num_experts) {
      schedule.expert_counts[e] = total;
    } else {
      *schedule.skipped_ids = total;
    }
  }
  for (int r = threadIdx.x; r < params.shape.num_ranks; r += kPlaceThreads) {
    schedule.tokens[r] = static_cast<std::int32_t>(batch.first_token[r + 1] - batch.first_token[r]);
  }
  if (threadIdx.x == 0) {
    *schedule.signature = params.shape.signature();
    *schedule.rank = rank;
  }
}

__global__ void __launch_bounds__(kPlaceThreads) place_kernel(const ScheduleParams params) {
  extern __shared__ std::int32_t memory[];
  const PlaceShared shared = lay_out(memory, params.shape);
  const int local = static_cast<int>(blockIdx.y);
  const int rank = params.num_local_ranks == 1 ? params.own_rank : params.ranks[local];
  plan::Schedule schedule =
      plan::view_schedule(params.shape, params.num_local_ranks == 1 ? params.own_schedule : params.schedules[local]);
  const int first_expert = rank * params.shape.experts_per_rank();
  const Batch batch = read_batch(params, shared.first_token);
  sum_tiles(params, first_expert, shared);
  place_experts(params.shape, shared, schedule);
  count_runs(params, batch, first_expert, shared);
  place_runs(params, batch, first_expert, shared, schedule);
  write_route_masks(params, rank, static_cast<std::int32_t>(batch.first_token[rank + 1] - batch.first_token[rank]),
                    schedule);
  if (blockIdx.x == kScheduleTiles - 1) write_summary(params, rank, batch, schedule);
}

std::int64_t count_bytes(const plan::ScheduleShape& shape) {
  return (std::int64_t{shape.num_experts} + 2) / 2 * 2 * 4 + (shape.num_ranks + 1) * 8;
}
std::int64_t place_bytes(const plan::ScheduleShape& shape) {
  return (place_words(shape) + 1) / 2 * 2 * 4 + (shape.num_ranks + 1) * 8;
}

}  // namespace

std::int64_t schedule_shared_bytes(const plan::ScheduleShape& shape) {
  return std::max(count_bytes(shape), place_bytes(shape));
}

void launch_schedule(const ScheduleParams& params, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const int most = static_cast<int>(kMaxScheduleSharedBytes);
  cudaFuncSetAttribute(count_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  cudaFuncSetAttribute(place_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  count_kernel<<<kScheduleTiles, kCountThreads, static_cast<std::size_t>(count_bytes(params.shape)), cuda_stream>>>(
      params);
  const dim3 grid(kScheduleTiles, static_cast<unsigned>(params.num_local_ranks));
  place_kernel<<<grid, kPlaceThreads, static_cast<std::size_t>(place_bytes(params.shape)), cuda_stream>>>(params);
}

}  // namespace clowder::sm90

#include "engine/sm90/plan_kernel.h"

#include <cub/block/block_scan.cuh>

#include "plan/cluster.h"

namespace clowder::sm90 {
namespace {

using Scan = cub::BlockScan<std::int64_t, kPlanThreads>;

struct PlanShared {
  typename Scan::TempStorage scan;
  std::int32_t num_chunks;  // most of any rank
};

// Exclusive prefix sums of values[0 .. count - 1], in place; the total. The whole block.
__device__ std::int64_t exclusive_sum(std::int64_t* values, std::int64_t count, PlanShared& shared) {
  std::int64_t total = 0;
  for (std::int64_t first = 0; first < count; first += kPlanThreads) {
    const std::int64_t i = first + threadIdx.x;
    std::int64_t value = i < count ? values[i] : 0;
    std::int64_t sum_here = 0;
    Scan(shared.scan).ExclusiveSum(value, value, sum_here);
    if (i < count) values[i] = total + value;
    total += sum_here;
    __syncthreads();
  }
  return total;
}

__device__ void place_experts(const PlanParams& params, const PlanRank& rank, PlanShared& shared) {
  std::int64_t total = 0;
  for (int first = 0; first < params.num_experts; first += kPlanThreads) {
    const int e = first + static_cast<int>(threadIdx.x);
    std::int64_t blocks = 0;
    if (e < params.num_experts) {
      const std::int32_t* begin = rank.schedule.expert_row_begin + e;
      blocks = plan::ceil_div(begin[1] - begin[0], params.shape.ring.block_rows);
    }
    std::int64_t sum_here = 0;
    Scan(shared.scan).ExclusiveSum(blocks, blocks, sum_here);
    if (e < params.num_experts) rank.expert_block_begin[e] = static_cast<std::int32_t>(total + blocks);
    total += sum_here;
    __syncthreads();
  }
  if (threadIdx.x == 0) rank.expert_block_begin[params.num_experts] = static_cast<std::int32_t>(total);
}

// The expert of a block: the last one that begins at or before it.
__device__ std::int32_t expert_of(const std::int32_t* expert_block_begin, std::int32_t num_experts, std::int32_t block) {
  std::int32_t low = 0;
  std::int32_t high = num_experts;  // the answer is in [low, high)
  while (high - low > 1) {
    const std::int32_t middle = (low + high) / 2;
    if (expert_block_begin[middle] <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// plan::build_chunks by one warp: what follows an expert that does not fit is found 32 experts at a time.
__device__ void place_chunks(const PlanParams& params, const PlanRank& rank, int lane) {
  const std::int32_t* begins = rank.expert_block_begin;
  const std::int32_t chunk_blocks = params.shape.ring.chunk_blocks;
  std::int32_t chunk = 0;
  std::int32_t begin = 0;
  std::int32_t expert = 0;
  while (expert < params.num_experts) {
    const std::int32_t e = expert + lane;
    const bool is_too_far = e < params.num_experts && begins[e + 1] - begin > chunk_blocks;
    const unsigned too_far = __ballot_sync(~0u, is_too_far);
    if (too_far == 0) {
      expert += 32;
      continue;
    }
    expert += __ffs(static_cast<int>(too_far)) - 1;
    const std::int32_t first = begins[expert];
    const std::int32_t last = begins[expert + 1];
    if (first > begin) {
      if (lane == 0) rank.chunk_begin[chunk] = begin;
      ++chunk;
      begin = first;
    }
    const std::int32_t pieces = plan::ceil_div(last - first, chunk_blocks);
    for (std::int32_t piece = 1; piece < pieces; ++piece) {
      if (lane == 0) rank.chunk_begin[chunk] = begin;
      ++chunk;
      begin = first + static_cast<std::int32_t>(std::int64_t{last - first} * piece / pieces);
    }
    ++expert;
  }
  const std::int32_t num_blocks = begins[params.num_experts];
  if (num_blocks > begin) {
    if (lane == 0) rank.chunk_begin[chunk] = begin;
    ++chunk;
  }
  if (lane != 0) return;
  rank.chunk_begin[chunk] = num_blocks;
  plan::RankPass& pass = *rank.pass;
  pass.rank = *rank.schedule.rank;
  pass.num_tokens = rank.schedule.tokens[pass.rank];
  pass.num_remote_tasks = num_blocks * (params.shape.pull_pieces + params.shape.tiles.down);
  pass.blocks.num_blocks = num_blocks;
  pass.blocks.num_chunks = chunk;
  pass.blocks.num_experts = params.num_experts;
  pass.blocks.block_expert = rank.block_expert;
  pass.blocks.block_row_begin = rank.block_row_begin;
  pass.blocks.block_row_count = rank.block_row_count;
  pass.blocks.expert_block_begin = rank.expert_block_begin;
  pass.blocks.chunk_begin = rank.chunk_begin;
}

__device__ void fill_blocks(const PlanParams& params, const PlanRank& rank) {
  const plan::RankPass& pass = *rank.pass;
  const std::int32_t block_rows = params.shape.ring.block_rows;
  for (std::int32_t block = threadIdx.x; block < pass.blocks.num_blocks; block += kPlanThreads) {
    const std::int32_t expert = expert_of(rank.expert_block_begin, params.num_experts, block);
    const std::int32_t begin =
        rank.schedule.expert_row_begin[expert] + (block - rank.expert_block_begin[expert]) * block_rows;
    const std::int32_t rest = rank.schedule.expert_row_begin[expert + 1] - begin;
    rank.block_expert[block] = expert;
    rank.block_row_begin[block] = begin;
    rank.block_row_count[block] = rest < block_rows ? rest : block_rows;
  }
}

__device__ void clear(std::int32_t* counters, std::int64_t count) {
  for (std::int64_t i = threadIdx.x; i < count; i += kPlanThreads) counters[i] = 0;
}

__device__ void clear_counters(const PlanParams& params, const PlanRank& rank) {
  const plan::RankPass& pass = *rank.pass;
  for (int kind = 0; kind < plan::kNumCounterKinds; ++kind) {
    if (rank.counters[kind] == nullptr) continue;
    clear(rank.counters[kind], plan::num_counters(params.shape, pass, static_cast<plan::CounterKind>(kind)));
  }
}

struct Phase {
  std::int32_t rank;
  std::int32_t chunk;
  bool is_down;
};

// Phases in the order of the queue: up(0), then up(q), down(q - 1) for q = 1, ..., each for all ranks.
__device__ std::int64_t phase_index(const PlanParams& params, std::int32_t num_chunks, const Phase& phase) {
  const std::int64_t ranks = params.num_ranks;
  if (!phase.is_down) return (phase.chunk == 0 ? 0 : ranks * (2 * phase.chunk - 1)) + phase.rank;
  if (phase.chunk == num_chunks - 1) return ranks * (2 * num_chunks - 1) + phase.rank;
  return ranks * (2 * phase.chunk + 2) + phase.rank;
}

// Calls visit(expert, first block, blocks) for the experts of a chunk.
template <class Visit>
__device__ void for_each_piece(const PlanParams& params, const PlanRank& rank, std::int32_t chunk, Visit&& visit) {
  std::int32_t block = rank.chunk_begin[chunk];
  const std::int32_t end = rank.chunk_begin[chunk + 1];
  for (std::int32_t e = expert_of(rank.expert_block_begin, params.num_experts, block); block < end; ++e) {
    const std::int32_t stop = min(end, rank.expert_block_begin[e + 1]);
    if (stop > block) visit(e, block, stop - block);
    block = stop;
  }
}

// Calls visit(phase) for this thread's share of all phases.
template <class Visit>
__device__ void for_each_phase(const PlanParams& params, std::int32_t num_chunks, Visit&& visit) {
  const std::int64_t count = std::int64_t{2} * params.num_ranks * num_chunks;
  for (std::int64_t i = threadIdx.x; i < count; i += kPlanThreads) {
    Phase phase;
    phase.is_down = i % 2 == 1;
    phase.rank = static_cast<std::int32_t>(i / 2 % params.num_ranks);
    phase.chunk = static_cast<std::int32_t>(i / 2 / params.num_ranks);
    if (phase.chunk < params.rank(phase.rank).pass->blocks.num_chunks) visit(phase);
  }
}

__device__ std::int32_t tiles_of(const PlanParams& params, const Phase& phase) {
  return phase.is_down ? params.shape.tiles.down : params.shape.tiles.up;
}

__device__ void count_phases(const PlanParams& params, std::int32_t num_chunks) {
  for_each_phase(params, num_chunks, [&](const Phase& phase) {
    std::int64_t segments = 0;
    std::int64_t tickets = 0;
    for_each_piece(params, params.rank(phase.rank), phase.chunk,
                   [&](std::int32_t, std::int32_t, std::int32_t num_blocks) {
                     ++segments;
                     tickets += plan::num_cluster_tasks(num_blocks, tiles_of(params, phase));
                   });
    const std::int64_t index = phase_index(params, num_chunks, phase);
    params.phase_segments[index] = segments;
    params.phase_tickets[index] = tickets;
  });
}

struct QueuePlace {
  std::int64_t segment;
  std::int64_t ticket;
};

__device__ void write_segment(const PlanParams& params, QueuePlace& place, plan::TaskKind kind, std::int32_t rank,
                              std::int32_t expert, std::int32_t first_block, std::int32_t num_blocks,
                              std::int32_t num_tiles) {
  plan::Segment segment;
  segment.first_ticket = place.ticket;
  segment.kind = kind;
  segment.rank = rank;
  segment.expert = expert;
  segment.first_block = first_block;
  segment.num_blocks = num_blocks;
  segment.num_tiles = num_tiles;
  params.segments[place.segment++] = segment;
  place.ticket += plan::num_cluster_tasks(num_blocks, num_tiles);
}

__device__ void write_phases(const PlanParams& params, std::int32_t num_chunks, const QueuePlace& first) {
  for_each_phase(params, num_chunks, [&](const Phase& phase) {
    const std::int64_t index = phase_index(params, num_chunks, phase);
    QueuePlace place{first.segment + params.phase_segments[index], first.ticket + params.phase_tickets[index]};
    const plan::TaskKind kind = phase.is_down ? plan::TaskKind::kDown : plan::TaskKind::kUp;
    for_each_piece(params, params.rank(phase.rank), phase.chunk,
                   [&](std::int32_t expert, std::int32_t block, std::int32_t num_blocks) {
                     write_segment(params, place, kind, phase.rank, expert, block, num_blocks, tiles_of(params, phase));
                   });
  });
}

// Groups of token blocks as plan::emit_tokens makes them. One thread.
__device__ void write_tokens(const PlanParams& params, QueuePlace& place, plan::TaskKind kind, std::int32_t num_tiles) {
  const std::int32_t group = params.shape.ring.chunk_blocks;
  for (std::int32_t r = 0; r < params.num_ranks; ++r) {
    const std::int32_t end = plan::token_blocks(params.shape, *params.rank(r).pass);
    for (std::int32_t first = 0; first < end; first += group) {
      write_segment(params, place, kind, r, -1, first, min(group, end - first), num_tiles);
    }
  }
}

__global__ void __launch_bounds__(kPlanThreads) plan_forward_kernel(const PlanParams params) {
  __shared__ PlanShared shared;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) shared.num_chunks = 0;
  for (int r = 0; r < params.num_ranks; ++r) place_experts(params, params.rank(r), shared);
  __syncthreads();
  for (int r = warp; r < params.num_ranks; r += kPlanThreads / 32) {
    place_chunks(params, params.rank(r), lane);
    if (lane == 0) atomicMax(&shared.num_chunks, params.rank(r).pass->blocks.num_chunks);
  }
  __syncthreads();
  const std::int32_t num_chunks = shared.num_chunks;
  const std::int64_t num_phases = std::int64_t{2} * params.num_ranks * num_chunks;
  for (std::int64_t i = threadIdx.x; i < num_phases; i += kPlanThreads) {
    params.phase_segments[i] = 0;
    params.phase_tickets[i] = 0;
  }
  __syncthreads();
  count_phases(params, num_chunks);
  for (int r = 0; r < params.num_ranks; ++r) {
    fill_blocks(params, params.rank(r));
    clear_counters(params, params.rank(r));
  }
  __syncthreads();
  const std::int64_t num_segments = exclusive_sum(params.phase_segments, num_phases, shared);
  const std::int64_t num_tickets = exclusive_sum(params.phase_tickets, num_phases, shared);

  QueuePlace shared_up{0, 0};
  if (params.shape.has_shared) {
    for (std::int32_t r = 0; r < params.num_ranks; ++r) {
      const std::int32_t group = params.shape.ring.chunk_blocks;
      const std::int32_t blocks = plan::token_blocks(params.shape, *params.rank(r).pass);
      shared_up.segment += plan::ceil_div(blocks, group);
      shared_up.ticket += blocks / group * plan::num_cluster_tasks(group, params.shape.tiles.shared_up) +
                          plan::num_cluster_tasks(blocks % group, params.shape.tiles.shared_up);
    }
  }
  write_phases(params, num_chunks, shared_up);
  if (threadIdx.x == 0) {
    QueuePlace place{0, 0};
    if (params.shape.has_shared) {
      write_tokens(params, place, plan::TaskKind::kSharedUp, params.shape.tiles.shared_up);
    }
    place.segment += num_segments;
    place.ticket += num_tickets;
    write_tokens(params, place, plan::TaskKind::kOut, params.shape.tiles.out);
    *params.math = {params.segments, place.segment, place.ticket};
    params.next_tickets[0] = 0;
    params.next_tickets[1] = 0;
  }
}

}  // namespace

void launch_plan(const PlanParams& params, void* stream) {
  plan_forward_kernel<<<1, kPlanThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
}

}  // namespace clowder::sm90

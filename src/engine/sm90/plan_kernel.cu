#include <cub/block/block_scan.cuh>

#include "engine/sm90/plan_kernel.h"
#include "plan/cluster.h"

namespace clowder::sm90 {
namespace {

using Scan = cub::BlockScan<std::int64_t, kPlanThreads>;

// One rank's lists stand in shared memory while the plan is made, if they fit: the walks over them are chains of loads.
constexpr int kSharedList = 2048;
constexpr int kSharedPhases = 1024;

struct PlanShared {
  typename Scan::TempStorage scan;
  std::int32_t num_chunks;  // most of any rank
  std::int32_t expert_block_begin[kSharedList];
  std::int32_t chunk_begin[kSharedList];
  std::int64_t phase_segments[kSharedPhases];
  std::int64_t phase_tickets[kSharedPhases];
  plan::RankPass pass;
};

struct Lists {
  std::int32_t* expert_block_begin;
  std::int32_t* chunk_begin;
  plan::RankPass* pass;
};

// What each phase counts, and then where it writes.
struct Phases {
  std::int64_t* segments;
  std::int64_t* tickets;
};

__device__ bool are_shared(const PlanParams& params) {
  return params.num_ranks == 1 && params.num_experts < kSharedList && params.max_chunks < kSharedList;
}

__device__ Lists lists_of(const PlanParams& params, int rank, PlanShared& shared) {
  if (are_shared(params)) return {shared.expert_block_begin, shared.chunk_begin, &shared.pass};
  return {params.rank(rank).expert_block_begin, params.rank(rank).chunk_begin, params.rank(rank).pass};
}

// In 32 bits, which a GPU divides much faster than 64.
__device__ std::int32_t divide_up(std::int32_t a, std::int32_t b) { return (a + b - 1) / b; }

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

__device__ void place_experts(const PlanParams& params, const PlanRank& rank, const Lists& lists, PlanShared& shared) {
  std::int64_t total = 0;
  for (int first = 0; first < params.num_experts; first += kPlanThreads) {
    const int e = first + static_cast<int>(threadIdx.x);
    std::int64_t blocks = 0;
    if (e < params.num_experts) {
      const std::int32_t* begin = rank.schedule.expert_row_begin + e;
      blocks = divide_up(begin[1] - begin[0], params.shape.ring.block_rows);
    }
    std::int64_t sum_here = 0;
    Scan(shared.scan).ExclusiveSum(blocks, blocks, sum_here);
    if (e < params.num_experts) lists.expert_block_begin[e] = static_cast<std::int32_t>(total + blocks);
    total += sum_here;
    __syncthreads();
  }
  if (threadIdx.x == 0) lists.expert_block_begin[params.num_experts] = static_cast<std::int32_t>(total);
}

// The expert of a block: the last one that begins at or before it.
__device__ std::int32_t expert_of(const std::int32_t* expert_block_begin, std::int32_t num_experts,
                                  std::int32_t block) {
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
__device__ void place_chunks(const PlanParams& params, const PlanRank& rank, const Lists& lists, int lane) {
  const std::int32_t* begins = lists.expert_block_begin;
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
      if (lane == 0) lists.chunk_begin[chunk] = begin;
      ++chunk;
      begin = first;
    }
    // Most experts fit, and a division takes long.
    const std::int32_t pieces = last - first <= chunk_blocks ? 1 : divide_up(last - first, chunk_blocks);
    for (std::int32_t piece = 1; piece < pieces; ++piece) {
      if (lane == 0) lists.chunk_begin[chunk] = begin;
      ++chunk;
      begin = first + static_cast<std::int32_t>(std::int64_t{last - first} * piece / pieces);
    }
    ++expert;
  }
  const std::int32_t num_blocks = begins[params.num_experts];
  if (num_blocks > begin) {
    if (lane == 0) lists.chunk_begin[chunk] = begin;
    ++chunk;
  }
  if (lane != 0) return;
  lists.chunk_begin[chunk] = num_blocks;
  plan::RankPass& pass = *lists.pass;
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

__device__ void fill_blocks(const PlanParams& params, const PlanRank& rank, const Lists& lists) {
  const plan::RankPass& pass = *lists.pass;
  const std::int32_t block_rows = params.shape.ring.block_rows;
  for (std::int32_t block = threadIdx.x; block < pass.blocks.num_blocks; block += kPlanThreads) {
    const std::int32_t expert = expert_of(lists.expert_block_begin, params.num_experts, block);
    const std::int32_t begin =
        rank.schedule.expert_row_begin[expert] + (block - lists.expert_block_begin[expert]) * block_rows;
    const std::int32_t rest = rank.schedule.expert_row_begin[expert + 1] - begin;
    rank.block_expert[block] = expert;
    rank.block_row_begin[block] = begin;
    rank.block_row_count[block] = rest < block_rows ? rest : block_rows;
  }
  if (!are_shared(params)) return;
  if (threadIdx.x == 0) *rank.pass = pass;
  for (int e = threadIdx.x; e <= params.num_experts; e += kPlanThreads) {
    rank.expert_block_begin[e] = lists.expert_block_begin[e];
  }
  for (int chunk = threadIdx.x; chunk <= pass.blocks.num_chunks; chunk += kPlanThreads) {
    rank.chunk_begin[chunk] = lists.chunk_begin[chunk];
  }
}

__device__ void clear(std::int32_t* counters, std::int64_t count) {
  for (std::int64_t i = threadIdx.x; i < count; i += kPlanThreads) counters[i] = 0;
}

__device__ void clear_counters(const PlanParams& params, const PlanRank& rank, const plan::RankPass& pass) {
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
__device__ void for_each_piece(const PlanParams& params, const Lists& rank, std::int32_t chunk, Visit&& visit) {
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
__device__ void for_each_phase(const PlanParams& params, std::int32_t num_chunks, PlanShared& shared, Visit&& visit) {
  const std::int32_t count = 2 * params.num_ranks * num_chunks;
  for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < count; i += kPlanThreads) {
    Phase phase;
    phase.is_down = i % 2 == 1;
    phase.rank = i / 2 % params.num_ranks;
    phase.chunk = i / 2 / params.num_ranks;
    if (phase.chunk < lists_of(params, phase.rank, shared).pass->blocks.num_chunks) visit(phase);
  }
}

__device__ std::int32_t tiles_of(const PlanParams& params, const Phase& phase) {
  return phase.is_down ? params.shape.tiles.down : params.shape.tiles.up;
}

__device__ void count_phases(const PlanParams& params, std::int32_t num_chunks, const Phases& phases,
                             PlanShared& shared) {
  for_each_phase(params, num_chunks, shared, [&](const Phase& phase) {
    std::int64_t segments = 0;
    std::int64_t tickets = 0;
    for_each_piece(params, lists_of(params, phase.rank, shared), phase.chunk,
                   [&](std::int32_t, std::int32_t, std::int32_t num_blocks) {
                     ++segments;
                     tickets += plan::num_cluster_tasks(num_blocks, tiles_of(params, phase));
                   });
    const std::int64_t index = phase_index(params, num_chunks, phase);
    phases.segments[index] = segments;
    phases.tickets[index] = tickets;
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

__device__ void write_phases(const PlanParams& params, std::int32_t num_chunks, const QueuePlace& first,
                             const Phases& phases, PlanShared& shared) {
  for_each_phase(params, num_chunks, shared, [&](const Phase& phase) {
    const std::int64_t index = phase_index(params, num_chunks, phase);
    QueuePlace place{first.segment + phases.segments[index], first.ticket + phases.tickets[index]};
    const plan::TaskKind kind = phase.is_down ? plan::TaskKind::kDown : plan::TaskKind::kUp;
    for_each_piece(params, lists_of(params, phase.rank, shared), phase.chunk,
                   [&](std::int32_t expert, std::int32_t block, std::int32_t num_blocks) {
                     write_segment(params, place, kind, phase.rank, expert, block, num_blocks, tiles_of(params, phase));
                   });
  });
}

// A rank's segments of token blocks as plan::emit_tokens makes them, each by a thread.
__device__ void write_tokens(const PlanParams& params, const QueuePlace& first, plan::TaskKind kind, std::int32_t rank,
                             const plan::RankPass& pass, std::int32_t num_tiles) {
  const std::int32_t group = params.shape.ring.chunk_blocks;
  const std::int32_t end = plan::token_blocks(params.shape, pass);
  for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i * group < end; i += kPlanThreads) {
    QueuePlace place{first.segment + i, first.ticket + i * plan::num_cluster_tasks(group, num_tiles)};
    write_segment(params, place, kind, rank, -1, i * group, min(group, end - i * group), num_tiles);
  }
}

// Where the queue stands after them.
__device__ QueuePlace after_tokens(const PlanParams& params, const QueuePlace& first, const plan::RankPass& pass,
                                   std::int32_t num_tiles) {
  const std::int32_t group = params.shape.ring.chunk_blocks;
  const std::int32_t blocks = plan::token_blocks(params.shape, pass);
  return {first.segment + divide_up(blocks, group), first.ticket +
                                                        blocks / group * plan::num_cluster_tasks(group, num_tiles) +
                                                        plan::num_cluster_tasks(blocks % group, num_tiles)};
}

// Segments of all ranks' tokens from `place` on; where the queue stands after them. The whole block.
__device__ QueuePlace place_tokens(const PlanParams& params, QueuePlace place, plan::TaskKind kind,
                                   std::int32_t num_tiles, PlanShared& shared) {
  for (std::int32_t r = 0; r < params.num_ranks; ++r) {
    const plan::RankPass& pass = *lists_of(params, r, shared).pass;
    write_tokens(params, place, kind, r, pass, num_tiles);
    place = after_tokens(params, place, pass, num_tiles);
  }
  return place;
}

__global__ void __launch_bounds__(kPlanThreads) plan_forward_kernel(const PlanParams params) {
  __shared__ PlanShared shared;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) shared.num_chunks = 0;
  for (int r = 0; r < params.num_ranks; ++r) {
    place_experts(params, params.rank(r), lists_of(params, r, shared), shared);
  }
  __syncthreads();
  for (int r = warp; r < params.num_ranks; r += kPlanThreads / 32) {
    const Lists lists = lists_of(params, r, shared);
    place_chunks(params, params.rank(r), lists, lane);
    if (lane == 0) atomicMax(&shared.num_chunks, lists.pass->blocks.num_chunks);
  }
  __syncthreads();
  const std::int32_t num_chunks = shared.num_chunks;
  const std::int32_t num_phases = 2 * params.num_ranks * num_chunks;
  const Phases phases = num_phases <= kSharedPhases ? Phases{shared.phase_segments, shared.phase_tickets}
                                                    : Phases{params.phase_segments, params.phase_tickets};
  for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < num_phases; i += kPlanThreads) {
    phases.segments[i] = 0;
    phases.tickets[i] = 0;
  }
  __syncthreads();
  count_phases(params, num_chunks, phases, shared);
  for (int r = 0; r < params.num_ranks; ++r) {
    const Lists lists = lists_of(params, r, shared);
    fill_blocks(params, params.rank(r), lists);
    clear_counters(params, params.rank(r), *lists.pass);
  }
  __syncthreads();
  const std::int64_t num_segments = exclusive_sum(phases.segments, num_phases, shared);
  const std::int64_t num_tickets = exclusive_sum(phases.tickets, num_phases, shared);

  QueuePlace place{0, 0};
  if (params.shape.has_shared) {
    place = place_tokens(params, place, plan::TaskKind::kSharedUp, params.shape.tiles.shared_up, shared);
  }
  write_phases(params, num_chunks, place, phases, shared);
  place = {place.segment + num_segments, place.ticket + num_tickets};
  place = place_tokens(params, place, plan::TaskKind::kOut, params.shape.tiles.out, shared);
  if (threadIdx.x == 0) {
    *params.math = {params.segments, place.segment, place.ticket};
    params.next_tickets[0] = 0;
    params.next_tickets[1] = 0;
    *params.progress = 0;
  }
}

}  // namespace

void launch_plan(const PlanParams& params, void* stream) {
  plan_forward_kernel<<<1, kPlanThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
}

}  // namespace clowder::sm90

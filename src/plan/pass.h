// One pass of a layer over the ranks of one launch: what both directions share.
#pragma once

#include <cstdint>

#include "plan/blocks.h"
#include "plan/task.h"

namespace clowder::plan {

// Output tiles of each GEMM. They depend on H, I, Is and the engine, never on T, R or E_l.
struct TileCounts {
  std::int32_t up = 0;  // gate/up, also recompute
  std::int32_t down = 0;
  std::int32_t hidden = 0;
  std::int32_t input = 0;
  std::int32_t weight13 = 0;
  std::int32_t weight2 = 0;
  std::int32_t shared_up = 0;
  std::int32_t out = 1;  // column tiles of a token block's out; more than one only with a shared expert
  std::int32_t shared_hidden = 0;
  std::int32_t shared_weight13 = 0;
  std::int32_t shared_weight2 = 0;
  std::int32_t input_sum = 1;
};

// The gradients that somebody asked for.
struct Needs {
  bool x = true;
  bool topk_weights = true;
  bool w13 = true;
  bool w2 = true;
  bool shared_w13 = true;
  bool shared_w2 = true;
};

// What all ranks of a pass have in common.
struct PassShape {
  Pass pass = Pass::kForward;
  RingShape ring;
  std::int64_t saved_rows = 0;  // of one rank
  bool has_shared = false;
  bool keep_x = false;
  std::int32_t pull_pieces = 1;  // copy tasks that pull one row block; 0: rows are read where they stand
  TileCounts tiles;
  Needs needs;  // of backward only

  CLOWDER_HD bool needs_routed_weights() const { return needs.w13 || needs.w2; }
  CLOWDER_HD bool needs_routed() const { return needs.x || needs.topk_weights || needs_routed_weights(); }
  CLOWDER_HD bool needs_shared_weights() const { return has_shared && (needs.shared_w13 || needs.shared_w2); }
  CLOWDER_HD bool needs_shared_hidden() const { return needs_shared_weights() || (has_shared && needs.x); }

  // dw leaves with the first input-gradient tile, which is there also when dx is not needed.
  CLOWDER_HD std::int32_t input_tiles() const { return needs.x ? tiles.input : (needs.topk_weights ? 1 : 0); }
  CLOWDER_HD std::int32_t input_sum_tiles() const { return needs.x ? tiles.input_sum : (needs.topk_weights ? 1 : 0); }
  CLOWDER_HD std::int32_t weight_tiles() const {
    return (needs.w13 ? tiles.weight13 : 0) + (needs.w2 ? tiles.weight2 : 0);
  }
  CLOWDER_HD std::int32_t shared_weight_tiles() const {
    return (needs.shared_w13 ? tiles.shared_weight13 : 0) + (needs.shared_w2 ? tiles.shared_weight2 : 0);
  }
};

// One rank's part of a pass. `weight_segment_of_block` [max_blocks] is written by the backward emitter.
struct RankPass {
  std::int32_t rank = 0;  // in the group
  std::int32_t num_tokens = 0;
  BlockTable blocks;
  std::int32_t* weight_segment_of_block = nullptr;
  std::int32_t num_weight_segments = 0;
  std::int32_t num_remote_tasks = 0;  // what kRemoteWork counts to

  // State of the backward emitter: which blocks' weight gradients have been placed.
  std::int32_t covered_experts = 0;
  std::int32_t covered_blocks = 0;
  std::int32_t num_carried = 0;
};

CLOWDER_HD inline std::int32_t token_blocks(const PassShape& shape, const RankPass& rank) {
  return ceil_div(rank.num_tokens, shape.ring.block_rows);
}

// How many counters of a kind one rank needs; a schedule pass needs none.
CLOWDER_HD inline std::int64_t num_counters(const PassShape& shape, const RankPass& rank, CounterKind kind) {
  if (shape.pass == Pass::kSchedule) return 0;
  switch (kind) {
    case CounterKind::kPulled:
    case CounterKind::kUp:
    case CounterKind::kDown:
    case CounterKind::kHidden:
    case CounterKind::kInput:
      return rank.blocks.num_blocks;
    case CounterKind::kWeight:
      return rank.num_weight_segments;
    case CounterKind::kCarry:
      return shape.weight_tiles();
    case CounterKind::kSharedUp:
      return token_blocks(shape, rank);
    case CounterKind::kRemoteWork:
      return 1;
  }
  return 0;
}

CLOWDER_HD inline bool is_saved(const PassShape& shape, const RankPass& rank, std::int32_t block) {
  return rank.blocks.is_saved(block, shape.saved_rows);
}

// Whether a backward pull takes x (from its source rank, or from the kept rows) beside dy.
CLOWDER_HD inline bool pulls_x(const PassShape& shape, const RankPass& rank, std::int32_t block) {
  return shape.needs.w13 || !is_saved(shape, rank, block);
}

CLOWDER_HD inline bool has_kept_x(const PassShape& shape, const RankPass& rank, std::int32_t block) {
  return shape.keep_x && is_saved(shape, rank, block);
}

// An emitter's sink: math(Segment) and copy(Segment) append to the two queues and set first_ticket. Emitters run twice
// where arrays have to be sized first, so a sink may only count.
template <class Sink>
CLOWDER_HD inline void emit_copy(Sink& sink, TaskKind kind, std::int32_t rank, std::int32_t first_block = 0,
                                 std::int32_t num_blocks = 1, std::int32_t num_pieces = 1) {
  if (num_blocks <= 0) return;
  Segment segment;
  segment.kind = kind;
  segment.rank = rank;
  segment.first_block = first_block;
  segment.num_blocks = num_blocks;
  segment.num_tiles = num_pieces;
  sink.copy(segment);
}

template <class Sink>
CLOWDER_HD inline void emit_math(Sink& sink, TaskKind kind, std::int32_t rank, std::int32_t first_block,
                                 std::int32_t num_blocks, std::int32_t num_tiles, std::int32_t expert = -1) {
  if (num_blocks <= 0 || num_tiles <= 0) return;
  Segment segment;
  segment.kind = kind;
  segment.rank = rank;
  segment.expert = expert;
  segment.first_block = first_block;
  segment.num_blocks = num_blocks;
  segment.num_tiles = num_tiles;
  sink.math(segment);
}

// Tasks of `kind` for a chunk's row blocks, one segment an expert.
template <class Sink>
CLOWDER_HD inline void emit_chunk(Sink& sink, TaskKind kind, std::int32_t rank_index, const RankPass& rank,
                                  std::int32_t chunk, std::int32_t num_tiles) {
  if (chunk < 0 || chunk >= rank.blocks.num_chunks) return;
  const std::int32_t end = rank.blocks.chunk_begin[chunk + 1];
  std::int32_t block = rank.blocks.chunk_begin[chunk];
  while (block < end) {
    const std::int32_t expert = rank.blocks.block_expert[block];
    const std::int32_t expert_end = rank.blocks.expert_block_begin[expert + 1];
    const std::int32_t stop = expert_end < end ? expert_end : end;
    emit_math(sink, kind, rank_index, block, stop - block, num_tiles, expert);
    block = stop;
  }
}

// Tasks of `kind` for the blocks of a rank's tokens. Groups of a chunk's size, so that their rows stay in the cache
// while all tiles of the weights pass.
template <class Sink>
CLOWDER_HD inline void emit_tokens(const PassShape& shape, Sink& sink, TaskKind kind, std::int32_t rank_index,
                                   const RankPass& rank, std::int32_t num_tiles) {
  const std::int32_t group = shape.ring.chunk_blocks;
  const std::int32_t end = token_blocks(shape, rank);
  for (std::int32_t first = 0; first < end; first += group) {
    emit_math(sink, kind, rank_index, first, end - first < group ? end - first : group, num_tiles);
  }
}

CLOWDER_HD inline std::int32_t most_chunks(const RankPass* ranks, std::int32_t num_ranks) {
  std::int32_t most = 0;
  for (std::int32_t r = 0; r < num_ranks; ++r) {
    if (ranks[r].blocks.num_chunks > most) most = ranks[r].blocks.num_chunks;
  }
  return most;
}

// The copy queue is the same for both directions: inputs out, row blocks in, chunk by chunk over the ranks; then done.
template <class Sink>
CLOWDER_HD inline void emit_copies(const PassShape& shape, const RankPass* ranks, std::int32_t num_ranks, bool pulls,
                                   Sink& sink) {
  for (std::int32_t r = 0; r < num_ranks; ++r) emit_copy(sink, TaskKind::kStageInputs, r);
  const std::int32_t chunks = pulls ? most_chunks(ranks, num_ranks) : 0;
  for (std::int32_t q = 0; q < chunks; ++q) {
    for (std::int32_t r = 0; r < num_ranks; ++r) {
      if (q >= ranks[r].blocks.num_chunks) continue;
      const std::int32_t begin = ranks[r].blocks.chunk_begin[q];
      emit_copy(sink, TaskKind::kPull, r, begin, ranks[r].blocks.chunk_begin[q + 1] - begin, shape.pull_pieces);
    }
  }
  for (std::int32_t r = 0; r < num_ranks; ++r) emit_copy(sink, TaskKind::kPublishDone, r);
  for (std::int32_t r = 0; r < num_ranks; ++r) emit_copy(sink, TaskKind::kFinish, r);
}

// The schedule pass has copy tasks only. Every rank's ids leave before any schedule waits for them.
template <class Sink>
CLOWDER_HD inline void emit_schedule(std::int32_t num_ranks, Sink& sink) {
  for (std::int32_t r = 0; r < num_ranks; ++r) emit_copy(sink, TaskKind::kStageIds, r);
  for (std::int32_t r = 0; r < num_ranks; ++r) emit_copy(sink, TaskKind::kBuildSchedule, r);
}

}  // namespace clowder::plan

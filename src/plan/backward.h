// The backward pass as tasks.
//
// Math queue: the shared expert's hidden gradient first; per chunk q [recompute and] hidden-gradient tiles of q, then
// the input-gradient tiles of q-1, then the weight gradients of the experts that ended by q-1; last the shared expert's
// weight gradients, which hide the last pushes, and the token sums.
//
// Rings are reused before an expert with many rows is complete, so weight gradients of the blocks that are about to be
// overwritten are placed first, as partial segments that hand their fp32 sums on through the carry. One expert is open
// at a time.
#pragma once

#include "plan/pass.h"

namespace clowder::plan {

template <class Sink>
CLOWDER_HD inline void emit_weight(const PassShape& shape, std::int32_t rank_index, RankPass& rank, std::int32_t expert,
                                   std::int32_t end_block, Sink& sink) {
  Segment segment;
  segment.kind = TaskKind::kWeight;
  segment.rank = rank_index;
  segment.expert = expert;
  segment.first_block = rank.covered_blocks;
  segment.num_blocks = end_block - rank.covered_blocks;
  segment.num_tiles = shape.weight_tiles();
  segment.weight_segment = rank.num_weight_segments++;
  segment.first_part = segment.first_block == rank.blocks.expert_block_begin[expert];
  segment.last_part = end_block == rank.blocks.expert_block_begin[expert + 1];
  if (segment.uses_carry()) segment.carry_index = rank.num_carried++;
  for (std::int32_t block = segment.first_block; block < end_block; ++block) {
    rank.weight_segment_of_block[block] = segment.weight_segment;
  }
  rank.covered_blocks = end_block;
  sink.math(segment);
}

// Places the weight gradients of all experts that end by block `limit`; an expert without rows gets its zeros here.
template <class Sink>
CLOWDER_HD inline void emit_whole_experts(const PassShape& shape, std::int32_t rank_index, RankPass& rank,
                                          std::int32_t limit, Sink& sink) {
  while (rank.covered_experts < rank.blocks.num_experts &&
         rank.blocks.expert_block_begin[rank.covered_experts + 1] <= limit) {
    const std::int32_t expert = rank.covered_experts++;
    emit_weight(shape, rank_index, rank, expert, rank.blocks.expert_block_begin[expert + 1], sink);
  }
}

// Before chunk q needs ring slots whose weight gradients are still missing, places everything up to the chunk before
// the last one that has been emitted: a ring of three chunks makes that enough.
template <class Sink>
CLOWDER_HD inline void emit_partial_weights(const PassShape& shape, std::int32_t rank_index, RankPass& rank,
                                            std::int32_t chunk, Sink& sink) {
  if (chunk >= rank.blocks.num_chunks) return;
  const std::int32_t freed_by_then = rank.blocks.chunk_begin[chunk + 1] - shape.ring.ring_blocks;
  if (rank.covered_blocks >= freed_by_then) return;
  const std::int32_t limit = rank.blocks.chunk_begin[chunk - 1];
  emit_whole_experts(shape, rank_index, rank, limit, sink);
  if (rank.covered_blocks < limit) emit_weight(shape, rank_index, rank, rank.covered_experts, limit, sink);
}

CLOWDER_HD inline void reset_weights(RankPass& rank) {
  rank.num_weight_segments = 0;
  rank.covered_experts = 0;
  rank.covered_blocks = 0;
  rank.num_carried = 0;
}

// Recompute tiles for those blocks of the chunk that were not saved. Saved blocks are a prefix of a rank's blocks.
template <class Sink>
CLOWDER_HD inline void emit_recompute(const PassShape& shape, std::int32_t rank_index, const RankPass& rank,
                                      std::int32_t chunk, Sink& sink) {
  const BlockTable& blocks = rank.blocks;
  if (chunk >= blocks.num_chunks) return;
  std::int32_t block = blocks.chunk_begin[chunk];
  const std::int32_t end = blocks.chunk_begin[chunk + 1];
  while (block < end && is_saved(shape, rank, block)) ++block;
  while (block < end) {
    const std::int32_t expert = blocks.block_expert[block];
    const std::int32_t expert_end = blocks.expert_block_begin[expert + 1];
    const std::int32_t stop = expert_end < end ? expert_end : end;
    emit_math(sink, TaskKind::kRecompute, rank_index, block, stop - block, shape.tiles.up, expert);
    block = stop;
  }
}

template <class Sink>
CLOWDER_HD inline void emit_routed_gradients(const PassShape& shape, RankPass* ranks, std::int32_t num_ranks,
                                             Sink& sink) {
  const bool weights = shape.needs_routed_weights();
  const std::int32_t chunks = most_chunks(ranks, num_ranks);
  for (std::int32_t q = 0; q <= chunks; ++q) {
    for (std::int32_t r = 0; r < num_ranks; ++r) {
      if (weights) emit_partial_weights(shape, r, ranks[r], q, sink);
      emit_recompute(shape, r, ranks[r], q, sink);
      emit_chunk(sink, TaskKind::kHidden, r, ranks[r], q, shape.tiles.hidden);
    }
    for (std::int32_t r = 0; r < num_ranks; ++r) {
      emit_chunk(sink, TaskKind::kInput, r, ranks[r], q - 1, shape.input_tiles());
      if (weights && q <= ranks[r].blocks.num_chunks) {
        emit_whole_experts(shape, r, ranks[r], ranks[r].blocks.chunk_begin[q], sink);
      }
    }
  }
}

template <class Sink>
CLOWDER_HD inline void emit_backward(const PassShape& shape, RankPass* ranks, std::int32_t num_ranks, Sink& sink) {
  const bool routed = shape.needs_routed();
  emit_copies(shape, ranks, num_ranks, routed && shape.pull_pieces > 0, sink);

  for (std::int32_t r = 0; r < num_ranks; ++r) {
    reset_weights(ranks[r]);
    ranks[r].num_remote_tasks = routed ? ranks[r].blocks.num_blocks * (shape.pull_pieces + shape.input_tiles()) : 0;
    if (shape.needs_shared_hidden()) {
      emit_tokens(shape, sink, TaskKind::kSharedHidden, r, ranks[r], shape.tiles.shared_hidden);
    }
  }
  if (routed) emit_routed_gradients(shape, ranks, num_ranks, sink);
  if (shape.needs_shared_weights()) {
    for (std::int32_t r = 0; r < num_ranks; ++r) {
      Segment segment;
      segment.kind = TaskKind::kSharedWeight;
      segment.rank = r;
      segment.num_blocks = token_blocks(shape, ranks[r]);
      segment.num_tiles = shape.shared_weight_tiles();
      sink.math(segment);
    }
  }
  for (std::int32_t r = 0; r < num_ranks; ++r) {
    emit_tokens(shape, sink, TaskKind::kInputSum, r, ranks[r], shape.input_sum_tiles());
  }
}

}  // namespace clowder::plan

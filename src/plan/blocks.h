// Row blocks and chunks of one rank's rows: arithmetic on a schedule, made anew for each pass because it depends on
// tuning.
//
// A row block is `block_rows` consecutive rows of one expert, the last one of an expert padded. A chunk is a run of row
// blocks that the task order finishes before it moves on. A ring holds at least three chunks.
#pragma once

#include <cstdint>

#include "model/host_device.h"
#include "plan/schedule.h"

namespace clowder::plan {

inline constexpr std::int32_t kMinRingBlocks = 3;
inline constexpr std::int32_t kChunksPerRing = 3;

CLOWDER_HD inline std::int32_t ceil_div(std::int64_t a, std::int64_t b) {
  return static_cast<std::int32_t>((a + b - 1) / b);
}

// Ring and chunk sizes in row blocks.
struct RingShape {
  std::int32_t block_rows = 0;
  std::int32_t ring_blocks = 0;   // >= kMinRingBlocks
  std::int32_t chunk_blocks = 0;  // the most blocks of a chunk; kChunksPerRing of them fit into the ring
};

// `ring_rows` is rounded down to whole blocks and must hold kMinRingBlocks of them; chunks shrink to fit.
CLOWDER_HD inline RingShape make_ring(std::int32_t block_rows, std::int64_t ring_rows, std::int64_t chunk_rows) {
  RingShape ring;
  ring.block_rows = block_rows;
  ring.ring_blocks = static_cast<std::int32_t>(ring_rows / block_rows);
  const std::int32_t wanted = ceil_div(chunk_rows, block_rows);
  const std::int32_t most = ring.ring_blocks / kChunksPerRing;
  ring.chunk_blocks = wanted < 1 ? 1 : (wanted < most ? wanted : most);
  return ring;
}

CLOWDER_HD inline std::int64_t min_ring_rows(std::int32_t block_rows) {
  return std::int64_t{kMinRingBlocks} * block_rows;
}

// Worst case over all routings; sizes the block table.
CLOWDER_HD inline std::int32_t max_blocks(const ScheduleShape& shape, std::int32_t block_rows) {
  return static_cast<std::int32_t>(shape.max_rows() / block_rows + shape.experts_per_rank());
}

// Arrays are the caller's: block_* [max_blocks], expert_block_begin [E_l + 1], chunk_begin [max_blocks + 1].
struct BlockTable {
  std::int32_t num_blocks = 0;
  std::int32_t num_chunks = 0;
  std::int32_t num_experts = 0;             // of this rank
  std::int32_t* block_expert = nullptr;     // local expert of a block
  std::int32_t* block_row_begin = nullptr;  // its first row
  std::int32_t* block_row_count = nullptr;  // its real rows, 1 to block_rows
  std::int32_t* expert_block_begin = nullptr;
  std::int32_t* chunk_begin = nullptr;

  CLOWDER_HD std::int32_t block_row_end(std::int32_t block) const {
    return block_row_begin[block] + block_row_count[block];
  }
  // A block is saved as a whole or not at all, so that one task serves it.
  CLOWDER_HD bool is_saved(std::int32_t block, std::int64_t saved_rows) const {
    return block_row_end(block) <= saved_rows;
  }
};

template <class Word>
CLOWDER_HD inline void build_blocks(const BasicScheduleView<Word>& schedule, std::int32_t block_rows,
                                    BlockTable& table) {
  table.num_experts = schedule.shape.experts_per_rank();
  std::int32_t block = 0;
  for (std::int32_t e = 0; e < table.num_experts; ++e) {
    table.expert_block_begin[e] = block;
    const std::int32_t end = schedule.expert_row_begin[e + 1];
    for (std::int32_t row = schedule.expert_row_begin[e]; row < end; row += block_rows) {
      table.block_expert[block] = e;
      table.block_row_begin[block] = row;
      table.block_row_count[block] = end - row < block_rows ? end - row : block_rows;
      ++block;
    }
  }
  table.expert_block_begin[table.num_experts] = block;
  table.num_blocks = block;
}

// Whole experts share a chunk while they fit; an expert larger than a chunk is split into near-equal chunks of its own.
CLOWDER_HD inline void build_chunks(std::int32_t chunk_blocks, BlockTable& table) {
  std::int32_t chunk = 0;
  std::int32_t begin = 0;  // of the open chunk
  for (std::int32_t e = 0; e < table.num_experts; ++e) {
    const std::int32_t first = table.expert_block_begin[e];
    const std::int32_t last = table.expert_block_begin[e + 1];
    if (last - begin <= chunk_blocks) continue;
    if (first > begin) {
      table.chunk_begin[chunk++] = begin;
      begin = first;
    }
    const std::int32_t pieces = ceil_div(last - first, chunk_blocks);
    for (std::int32_t piece = 1; piece < pieces; ++piece) {
      table.chunk_begin[chunk++] = begin;
      begin = first + static_cast<std::int32_t>(std::int64_t{last - first} * piece / pieces);
    }
  }
  if (table.num_blocks > begin) table.chunk_begin[chunk++] = begin;
  table.chunk_begin[chunk] = table.num_blocks;
  table.num_chunks = chunk;
}

}  // namespace clowder::plan

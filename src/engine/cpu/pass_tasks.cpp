#include "engine/cpu/pass_tasks.h"

#include <algorithm>
#include <cstring>

#include "model/shape.h"

namespace clowder::cpu {

Block PassTasks::row_block(const RankView& rank, std::int32_t block) const {
  const plan::BlockTable& blocks = rank.pass->blocks;
  return {blocks.block_row_begin[block], blocks.block_row_count[block],
          std::int64_t{block % pass_.ring.ring_blocks} * kBlockRows};
}

Block PassTasks::token_block(const RankView& rank, std::int32_t block) const {
  const std::int64_t first = std::int64_t{block} * kBlockRows;
  return {first, static_cast<int>(std::min<std::int64_t>(kBlockRows, num_tokens(rank) - first)), 0};
}

Rows<bf16> PassTasks::slot_rows(const RankView& rank, const Block& block) const {
  Rows<bf16> rows;
  rows.count = block.count;
  for (int i = 0; i < block.count; ++i) {
    const plan::RowSource to = source(rank, block, i);
    rows.at[i] = memory_[static_cast<std::size_t>(to.rank)].slots + to.slot * shape_.hidden;
  }
  return rows;
}

void PassTasks::copy_rows(const Rows<const bf16>& from, std::int64_t width, const Rows<bf16>& to) const {
  for (int i = 0; i < from.count; ++i) {
    std::memcpy(to.at[i], from.at[i], static_cast<std::size_t>(width) * sizeof(bf16));
  }
}

void PassTasks::product(const Rows<const bf16>& rows, const WeightView& weights, int terms, int outputs,
                        const Scratch& scratch, float* sums) const {
  kernels_.pack_rows(rows.at, rows.count, terms, scratch.panel);
  std::fill_n(sums, outputs * kLanes, 0.0f);
  kernels_.multiply(scratch.panel, weights, terms, outputs, rows.count, sums);
}

void PassTasks::gate_up_tile(const Rows<const bf16>& x, const ExpertWeights& weights, std::int64_t width,
                             const Range& tile, const Rows<bf16>* gate_up, const Rows<bf16>* h,
                             const Scratch& scratch) const {
  const std::int64_t hidden = shape_.hidden;
  const auto rows_of = [&](const bf16* matrix) {
    return WeightView{matrix + tile.begin * hidden, hidden, WeightLayout::kOutputsByTerms};
  };
  float* gate = scratch.sums;
  float* up = gate + kHiddenTile * kLanes;
  float* activated = up + kHiddenTile * kLanes;
  product(x, rows_of(weights.w1), static_cast<int>(hidden), tile.size, scratch, gate);
  std::fill_n(up, tile.size * kLanes, 0.0f);
  kernels_.multiply(scratch.panel, rows_of(weights.w3), static_cast<int>(hidden), tile.size, x.count, up);
  scratch.recorder->turn_to(Role::kEpilogue);
  if (gate_up != nullptr) {
    kernels_.unpack_rows(gate, tile.size, x.count, gate_up->columns_from(tile.begin).at);
    kernels_.unpack_rows(up, tile.size, x.count, gate_up->columns_from(width + tile.begin).at);
  }
  if (h != nullptr) {
    kernels_.activate(shape_.activation, gate, up, tile.size, activated);
    kernels_.unpack_rows(activated, tile.size, x.count, h->columns_from(tile.begin).at);
  }
}

Range PassTasks::sum_columns(int tile) const {
  if (shape_.shared_intermediate == 0) return {0, static_cast<int>(shape_.hidden)};
  return tile_range(tile, kOutputTile, shape_.hidden);
}

void PassTasks::sum_slots(const RankView& rank, const Block& block, const float* weights, const Range& columns,
                          const Scratch& scratch, bf16* out) const {
  const bool has_shared = shape_.shared_intermediate > 0;
  scratch.recorder->turn_to(Role::kReduce);
  static_assert(2 * kOutputTile <= kScratchSums);
  float* shared_rows = scratch.sums + kOutputTile * kLanes;
  if (has_shared) kernels_.transpose(scratch.sums, columns.size, kOutputTile, shared_rows);

  const bf16* slots = own_memory(rank).slots;
  for (int i = 0; i < block.count; ++i) {
    const std::int64_t token = block.first_row + i;
    const bf16* rows[kMaxTopk];
    float factors[kMaxTopk];
    int count = 0;
    for (std::int32_t slot = 0; slot < shape_.topk; ++slot) {
      if (!rank.schedule.has_route(token, slot)) continue;
      const std::int64_t index = token * shape_.topk + slot;
      rows[count] = slots + index * shape_.hidden + columns.begin;
      factors[count] = weights == nullptr ? 1.0f : weights[index];
      ++count;
    }
    kernels_.combine(has_shared ? shared_rows + i * kOutputTile : nullptr, rows, factors, count, columns.size,
                     out + token * shape_.hidden + columns.begin);
  }
}

}  // namespace clowder::cpu

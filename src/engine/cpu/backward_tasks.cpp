#include "engine/cpu/backward_tasks.h"

#include <algorithm>
#include <cstring>

#include "model/gradient_mode.h"

namespace clowder::cpu {
namespace {

// A tile of an expert's gradients: which matrix, which part of it, and its operands.
struct GradientTile {
  void* gradient;
  Range rows;
  Range columns;
  std::int64_t num_columns;
  bool is_w2;
  std::int64_t first_output;  // of [dg,du]
};

// Tiles stand in the order w1, w3, w2; each matrix row tile by row tile. tiles13 of them are of w1 and w3.
GradientTile gradient_tile(int tile, int tiles13, const ExpertGradients& gradients, std::int64_t hidden,
                           std::int64_t width) {
  GradientTile result{};
  result.is_w2 = tile >= tiles13;
  const bool is_w3 = !result.is_w2 && tile >= tiles13 / 2;
  const std::int64_t num_rows = result.is_w2 ? hidden : width;
  result.num_columns = result.is_w2 ? width : hidden;
  result.gradient = result.is_w2 ? gradients.w2 : (is_w3 ? gradients.w3 : gradients.w1);
  result.first_output = is_w3 ? width : 0;
  const int within = tile - (result.is_w2 ? tiles13 : (is_w3 ? tiles13 / 2 : 0));
  const int column_tiles = num_tiles(result.num_columns, kWeightTile);
  result.rows = tile_range(within / column_tiles, kWeightTile, num_rows);
  result.columns = tile_range(within % column_tiles, kWeightTile, result.num_columns);
  return result;
}

void* element(void* base, std::int64_t index, GradientMode mode) {
  return static_cast<std::byte*>(base) + static_cast<std::size_t>(index) * gradient_bytes(mode);
}

}  // namespace

void BackwardTasks::execute(const plan::Task& task, const Scratch& scratch) {
  switch (task.kind()) {
    case plan::TaskKind::kStageInputs:
      return stage_inputs(task);
    case plan::TaskKind::kPull:
      return pull(task);
    case plan::TaskKind::kRecompute:
      return recompute(task, scratch);
    case plan::TaskKind::kHidden:
      return hidden(task, scratch);
    case plan::TaskKind::kInput:
      return input(task, scratch);
    case plan::TaskKind::kWeight:
      return weight(task, scratch);
    case plan::TaskKind::kSharedHidden:
      return shared_hidden(task, scratch);
    case plan::TaskKind::kSharedWeight:
      return shared_weight(task, scratch);
    case plan::TaskKind::kInputSum:
      return input_sum(task, scratch);
    default:
      return;  // kPublishDone and kFinish only wait and signal
  }
}

void BackwardTasks::stage_inputs(const plan::Task& task) const {
  const RankView& rank = view(task);
  if (!has_peers() || num_tokens(rank) == 0) return;
  const BackwardInputs& in = inputs(task);
  const RankMemory& own = own_memory(rank);
  const auto bytes = static_cast<std::size_t>(num_tokens(rank) * shape_.hidden) * sizeof(bf16);
  std::memcpy(own.x, in.x, bytes);
  std::memcpy(own.dy, in.dout, bytes);
  std::memcpy(own.weights, in.topk_weights, static_cast<std::size_t>(num_tokens(rank) * shape_.topk) * sizeof(float));
}

void BackwardTasks::pull(const plan::Task& task) const {
  const RankView& rank = view(task);
  const BackwardInputs& in = inputs(task);
  const Block block = row_block(rank, task.block);
  const std::int64_t hidden = shape_.hidden;
  const auto ring = [&](const Buffer<bf16>& buffer) {
    return consecutive_rows(buffer.data() + block.ring_row * hidden, hidden, block.count);
  };
  const auto peer = [&](std::int32_t source) -> const RankMemory& { return memory_[static_cast<std::size_t>(source)]; };

  const auto dy_of = [&](std::int32_t source) -> const bf16* { return has_peers() ? peer(source).dy : in.dout; };
  copy_rows(source_rows(rank, block, dy_of), hidden, ring(rank.buffers->dy));
  for (int i = 0; i < block.count; ++i) {
    const plan::RowSource from = source(rank, block, i);
    const float* weights = has_peers() ? peer(from.rank).weights : in.topk_weights;
    rank.buffers->weights.data()[block.ring_row + i] = weights[from.slot];
  }
  if (!plan::pulls_x(pass_, *rank.pass, task.block)) return;
  if (plan::has_kept_x(pass_, *rank.pass, task.block)) {
    const bf16* kept = in.saved.x + block.first_row * hidden;
    copy_rows(consecutive_rows(kept, hidden, block.count), hidden, ring(rank.buffers->x));
  } else {
    const auto x_of = [&](std::int32_t source) -> const bf16* { return has_peers() ? peer(source).x : in.x; };
    copy_rows(source_rows(rank, block, x_of), hidden, ring(rank.buffers->x));
  }
}

Rows<bf16> BackwardTasks::recomputed_rows(const RankView& rank, const Block& block) const {
  const std::int64_t width = 2 * shape_.intermediate;
  return consecutive_rows(rank.buffers->gate_up.data() + block.ring_row * width, width, block.count);
}

void BackwardTasks::recompute(const plan::Task& task, const Scratch& scratch) const {
  const RankView& rank = view(task);
  const Block block = row_block(rank, task.block);
  const std::int64_t width = shape_.intermediate;
  const auto x = consecutive_rows(rank.buffers->x.data() + block.ring_row * shape_.hidden, shape_.hidden, block.count);
  const Rows<bf16> gate_up = recomputed_rows(rank, block);
  gate_up_tile(x, block_weights(inputs(task).experts, task), width, tile_range(task.tile, kHiddenTile, width), &gate_up,
               nullptr, scratch);
}

void BackwardTasks::hidden_tile(const HiddenRows& rows, const bf16* w2, std::int64_t width, const Range& tile,
                                const float* weights, float* dw, const Scratch& scratch) const {
  constexpr int kPart = kHiddenTile * kLanes;
  float* part = scratch.sums;
  const HiddenTile operands{tile.size, part + kPart,     part + 2 * kPart, weights,
                            part,      part + 3 * kPart, part + 4 * kPart, dw};
  static_assert(5 * kHiddenTile <= kScratchSums);
  product(rows.dy, {w2 + tile.begin, width, WeightLayout::kTermsByOutputs}, static_cast<int>(shape_.hidden), tile.size,
          scratch, operands.dh);
  scratch.recorder->turn_to(Role::kEpilogue);
  const int count = rows.dy.count;
  kernels_.pack_rows(rows.gate_up.columns_from(tile.begin).at, count, tile.size, part + kPart);
  kernels_.pack_rows(rows.gate_up.columns_from(width + tile.begin).at, count, tile.size, part + 2 * kPart);
  kernels_.hidden_gradient(shape_.activation, operands);
  kernels_.unpack_rows(operands.dh, tile.size, count, rows.gate_up_gradient.columns_from(tile.begin).at);
  kernels_.unpack_rows(operands.du, tile.size, count, rows.gate_up_gradient.columns_from(width + tile.begin).at);
  kernels_.unpack_rows(operands.weighted_hidden, tile.size, count, rows.weighted_hidden.columns_from(tile.begin).at);
}

void BackwardTasks::hidden(const plan::Task& task, const Scratch& scratch) const {
  const RankView& rank = view(task);
  const RankBuffers& buffers = *rank.buffers;
  const Block block = row_block(rank, task.block);
  const std::int64_t width = shape_.intermediate;
  HiddenRows rows;
  rows.dy = consecutive_rows(buffers.dy.data() + block.ring_row * shape_.hidden, shape_.hidden, block.count);
  if (plan::is_saved(pass_, *rank.pass, task.block)) {
    const bf16* saved = inputs(task).saved.gate_up + block.first_row * 2 * width;
    rows.gate_up = consecutive_rows(saved, 2 * width, block.count);
  } else {
    rows.gate_up = recomputed_rows(rank, block);
  }
  rows.gate_up_gradient =
      consecutive_rows(buffers.gate_up_gradient.data() + block.ring_row * 2 * width, 2 * width, block.count);
  rows.weighted_hidden = consecutive_rows(buffers.weighted_hidden.data() + block.ring_row * width, width, block.count);

  float weights[kLanes] = {};
  std::copy_n(buffers.weights.data() + block.ring_row, block.count, weights);
  float* dw = buffers.dw_partials.data() + (block.ring_row * pass_.tiles.hidden + task.tile * kLanes);
  hidden_tile(rows, block_weights(inputs(task).experts, task).w2, width, tile_range(task.tile, kHiddenTile, width),
              weights, dw, scratch);
}

void BackwardTasks::shared_hidden(const plan::Task& task, const Scratch& scratch) const {
  const RankView& rank = view(task);
  const BackwardInputs& in = inputs(task);
  const RankBuffers& buffers = *rank.buffers;
  const Block block = token_block(rank, task.block);
  const std::int64_t width = shape_.shared_intermediate;
  HiddenRows rows;
  rows.dy = consecutive_rows(in.dout + block.first_row * shape_.hidden, shape_.hidden, block.count);
  const bf16* saved = in.saved.shared_gate_up + block.first_row * 2 * width;
  rows.gate_up = consecutive_rows(saved, 2 * width, block.count);
  rows.gate_up_gradient =
      consecutive_rows(buffers.shared_gate_up_gradient.data() + block.first_row * 2 * width, 2 * width, block.count);
  rows.weighted_hidden =
      consecutive_rows(buffers.shared_weighted_hidden.data() + block.first_row * width, width, block.count);

  float weights[kLanes];
  std::fill_n(weights, kLanes, 1.0f);
  float unused_dw[kLanes];
  hidden_tile(rows, in.shared.w2, width, tile_range(task.tile, kHiddenTile, width), weights, unused_dw, scratch);
}

void BackwardTasks::input_tile(const Rows<const bf16>& gate_up_gradient, const ExpertWeights& weights,
                               std::int64_t width, const Range& tile, const Scratch& scratch) const {
  const int terms = static_cast<int>(width);
  const auto columns_of = [&](const bf16* matrix) {
    return WeightView{matrix + tile.begin, shape_.hidden, WeightLayout::kTermsByOutputs};
  };
  kernels_.pack_rows(gate_up_gradient.at, gate_up_gradient.count, 2 * terms, scratch.panel);
  std::fill_n(scratch.sums, tile.size * kLanes, 0.0f);
  const int lanes = gate_up_gradient.count;
  kernels_.multiply(scratch.panel, columns_of(weights.w1), terms, tile.size, lanes, scratch.sums);
  kernels_.multiply(scratch.panel + terms * kLanes, columns_of(weights.w3), terms, tile.size, lanes, scratch.sums);
}

void BackwardTasks::input(const plan::Task& task, const Scratch& scratch) const {
  const RankView& rank = view(task);
  const Block block = row_block(rank, task.block);
  if (task.tile == 0 && pass_.needs.topk_weights) push_weight_gradients(rank, block);
  if (!pass_.needs.x) return;
  const std::int64_t width = shape_.intermediate;
  const Range tile = tile_range(task.tile, kOutputTile, shape_.hidden);
  const bf16* gradient = rank.buffers->gate_up_gradient.data() + block.ring_row * 2 * width;
  input_tile(consecutive_rows(gradient, 2 * width, block.count), block_weights(inputs(task).experts, task), width, tile,
             scratch);
  scratch.recorder->turn_to(Role::kEpilogue);
  kernels_.unpack_rows(scratch.sums, tile.size, block.count, slot_rows(rank, block).columns_from(tile.begin).at);
}

// Adds the partials of dw in the order of their tiles, and sends the sums to the rows' sources.
void BackwardTasks::push_weight_gradients(const RankView& rank, const Block& block) const {
  const float* partials = rank.buffers->dw_partials.data() + block.ring_row * pass_.tiles.hidden;
  for (int i = 0; i < block.count; ++i) {
    float sum = 0.0f;
    for (int tile = 0; tile < pass_.tiles.hidden; ++tile) sum += partials[tile * kLanes + i];
    const plan::RowSource to = source(rank, block, i);
    memory_[static_cast<std::size_t>(to.rank)].dw[to.slot] = sum;
  }
}

template <class Operands>
BackwardTasks::WeightOperands BackwardTasks::operand_run(const plan::Segment& segment, const Operands& operands,
                                                         std::int32_t& block) const {
  WeightOperands run = operands(block++);
  for (; block < segment.first_block + segment.num_blocks && run.count % kBlockRows == 0; ++block) {
    const WeightOperands next = operands(block);
    const bool follows = next.x == run.x + run.count * shape_.hidden;
    if (!follows || run.count + next.count > kWeightRun) break;
    run.count += next.count;
  }
  return run;
}

template <class Operands>
void BackwardTasks::weight_tile(const plan::Segment& segment, int tile, int tiles13, const ExpertGradients& gradients,
                                std::int64_t width, float* carry, const Operands& operands,
                                const Scratch& scratch) const {
  if (segment.num_blocks == 0 && is_accumulating(mode_)) return;
  const GradientTile target = gradient_tile(tile, tiles13, gradients, shape_.hidden, width);
  for (int c = 0; c < target.columns.size; c += kLanes) {
    const std::int64_t column = target.columns.begin + c;
    const int strip = target.rows.size * kLanes;
    if (segment.first_part) {
      std::fill_n(scratch.sums, strip, 0.0f);
    } else {
      std::copy_n(carry + c * kWeightTile, strip, scratch.sums);
    }
    for (std::int32_t b = segment.first_block; b < segment.first_block + segment.num_blocks;) {
      const WeightOperands rows = operand_run(segment, operands, b);
      if (target.is_w2) {
        kernels_.pack_columns(rows.weighted_hidden + column, width, rows.count, scratch.panel);
        kernels_.multiply(scratch.panel, {rows.dy + target.rows.begin, shape_.hidden, WeightLayout::kTermsByOutputs},
                          rows.count, target.rows.size, kLanes, scratch.sums);
      } else {
        kernels_.pack_columns(rows.x + column, shape_.hidden, rows.count, scratch.panel);
        const bf16* gradient = rows.gate_up_gradient + target.first_output + target.rows.begin;
        kernels_.multiply(scratch.panel, {gradient, 2 * width, WeightLayout::kTermsByOutputs}, rows.count,
                          target.rows.size, kLanes, scratch.sums);
      }
    }
    if (segment.last_part) {
      const std::int64_t first = target.rows.begin * target.num_columns + column;
      kernels_.store_gradient(scratch.sums, target.rows.size, mode_, element(target.gradient, first, mode_),
                              target.num_columns);
    } else {
      std::copy_n(scratch.sums, strip, carry + c * kWeightTile);
    }
  }
}

void BackwardTasks::weight(const plan::Task& task, const Scratch& scratch) const {
  const RankView& rank = view(task);
  const RankBuffers& buffers = *rank.buffers;
  const plan::Segment& segment = *task.segment;
  const std::int64_t width = shape_.intermediate;
  const auto operands = [&](std::int32_t b) {
    const Block block = row_block(rank, b);
    return WeightOperands{buffers.x.data() + block.ring_row * shape_.hidden,
                          buffers.dy.data() + block.ring_row * shape_.hidden,
                          buffers.gate_up_gradient.data() + block.ring_row * 2 * width,
                          buffers.weighted_hidden.data() + block.ring_row * width, block.count};
  };
  const int tiles13 = pass_.needs.w13 ? pass_.tiles.weight13 : 0;
  float* carry = buffers.carry.data() + std::int64_t{task.tile} * kWeightTile * kWeightTile;
  weight_tile(segment, task.tile, tiles13, inputs(task).expert_gradients[static_cast<std::size_t>(segment.expert)],
              width, carry, operands, scratch);
}

void BackwardTasks::shared_weight(const plan::Task& task, const Scratch& scratch) const {
  const RankView& rank = view(task);
  const BackwardInputs& in = inputs(task);
  const RankBuffers& buffers = *rank.buffers;
  const std::int64_t width = shape_.shared_intermediate;
  const auto operands = [&](std::int32_t b) {
    const Block block = token_block(rank, b);
    return WeightOperands{in.x + block.first_row * shape_.hidden, in.dout + block.first_row * shape_.hidden,
                          buffers.shared_gate_up_gradient.data() + block.first_row * 2 * width,
                          buffers.shared_weighted_hidden.data() + block.first_row * width, block.count};
  };
  const int tiles13 = pass_.needs.shared_w13 ? pass_.tiles.shared_weight13 : 0;
  weight_tile(*task.segment, task.tile, tiles13, in.shared_gradients, width, nullptr, operands, scratch);
}

void BackwardTasks::weight_gradients(const RankView& rank, std::int64_t token, float* gradients) const {
  for (std::int32_t slot = 0; slot < shape_.topk; ++slot) {
    const std::int64_t index = token * shape_.topk + slot;
    gradients[index] = rank.schedule.has_route(token, slot) ? own_memory(rank).dw[index] : 0.0f;
  }
}

void BackwardTasks::input_sum(const plan::Task& task, const Scratch& scratch) const {
  const RankView& rank = view(task);
  const BackwardInputs& in = inputs(task);
  const Block block = token_block(rank, task.block);
  if (task.tile == 0 && in.dtopk_weights != nullptr) {
    for (int i = 0; i < block.count; ++i) weight_gradients(rank, block.first_row + i, in.dtopk_weights);
  }
  if (in.dx == nullptr) return;
  const std::int64_t width = shape_.shared_intermediate;
  const Range columns = sum_columns(task.tile);
  if (width > 0) {
    const bf16* gradient = rank.buffers->shared_gate_up_gradient.data() + block.first_row * 2 * width;
    input_tile(consecutive_rows(gradient, 2 * width, block.count), in.shared, width, columns, scratch);
  }
  sum_slots(rank, block, nullptr, columns, scratch, in.dx);
}

}  // namespace clowder::cpu

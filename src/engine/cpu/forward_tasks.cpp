#include "engine/cpu/forward_tasks.h"

#include <cstring>

namespace clowder::cpu {

void ForwardTasks::execute(const plan::Task& task, const Scratch& scratch) {
  switch (task.kind()) {
    case plan::TaskKind::kStageInputs:
      return stage_inputs(task);
    case plan::TaskKind::kPull:
      return pull(task);
    case plan::TaskKind::kSharedUp:
      return shared_up(task, scratch);
    case plan::TaskKind::kUp:
      return up(task, scratch);
    case plan::TaskKind::kDown:
      return down(task, scratch);
    case plan::TaskKind::kOut:
      return out(task, scratch);
    default:
      return;  // kPublishDone and kFinish only wait and signal
  }
}

void ForwardTasks::stage_inputs(const plan::Task& task) const {
  const RankView& rank = view(task);
  if (!has_peers() || num_tokens(rank) == 0) return;
  const std::int64_t elements = num_tokens(rank) * shape_.hidden;
  std::memcpy(own_memory(rank).x, inputs(task).x, static_cast<std::size_t>(elements) * sizeof(bf16));
}

void ForwardTasks::pull(const plan::Task& task) const {
  const RankView& rank = view(task);
  const ForwardInputs& in = inputs(task);
  const Block block = row_block(rank, task.block);
  const Rows<const bf16> from = source_rows(rank, block, [&](std::int32_t source) -> const bf16* {
    return has_peers() ? memory_[static_cast<std::size_t>(source)].x : in.x;
  });
  const std::int64_t hidden = shape_.hidden;
  copy_rows(from, hidden, consecutive_rows(rank.buffers->x.data() + block.ring_row * hidden, hidden, block.count));
  if (plan::has_kept_x(pass_, *rank.pass, task.block)) {
    copy_rows(from, hidden, consecutive_rows(in.saved.x + block.first_row * hidden, hidden, block.count));
  }
}

void ForwardTasks::shared_up(const plan::Task& task, const Scratch& scratch) const {
  const RankView& rank = view(task);
  const ForwardInputs& in = inputs(task);
  const Block block = token_block(rank, task.block);
  const std::int64_t width = shape_.shared_intermediate;
  const auto x = consecutive_rows(in.x + block.first_row * shape_.hidden, shape_.hidden, block.count);
  const auto h = consecutive_rows(rank.buffers->shared_h.data() + block.first_row * width, width, block.count);
  Rows<bf16> saved;
  const bool is_saved = in.saved.shared_gate_up != nullptr;
  if (is_saved) {
    saved = consecutive_rows(in.saved.shared_gate_up + block.first_row * 2 * width, 2 * width, block.count);
  }
  gate_up_tile(x, in.shared, width, tile_range(task.tile, kHiddenTile, width), is_saved ? &saved : nullptr, &h,
               scratch);
}

void ForwardTasks::up(const plan::Task& task, const Scratch& scratch) const {
  const RankView& rank = view(task);
  const ForwardInputs& in = inputs(task);
  const Block block = row_block(rank, task.block);
  const std::int64_t width = shape_.intermediate;
  const auto x = consecutive_rows(rank.buffers->x.data() + block.ring_row * shape_.hidden, shape_.hidden, block.count);
  const auto h = consecutive_rows(rank.buffers->h.data() + block.ring_row * width, width, block.count);
  Rows<bf16> saved;
  const bool is_saved = plan::is_saved(pass_, *rank.pass, task.block);
  if (is_saved) saved = consecutive_rows(in.saved.gate_up + block.first_row * 2 * width, 2 * width, block.count);
  gate_up_tile(x, block_weights(in.experts, task), width, tile_range(task.tile, kHiddenTile, width),
               is_saved ? &saved : nullptr, &h, scratch);
}

void ForwardTasks::down(const plan::Task& task, const Scratch& scratch) const {
  const RankView& rank = view(task);
  const Block block = row_block(rank, task.block);
  const std::int64_t width = shape_.intermediate;
  const Range tile = tile_range(task.tile, kOutputTile, shape_.hidden);
  const auto h = consecutive_rows(rank.buffers->h.data() + block.ring_row * width, width, block.count);
  const bf16* w2 = block_weights(inputs(task).experts, task).w2;
  product(h, {w2 + tile.begin * width, width, WeightLayout::kOutputsByTerms}, static_cast<int>(width), tile.size,
          scratch, scratch.sums);
  scratch.recorder->turn_to(Role::kEpilogue);
  kernels_.unpack_rows(scratch.sums, tile.size, block.count, slot_rows(rank, block).columns_from(tile.begin).at);
}

void ForwardTasks::out(const plan::Task& task, const Scratch& scratch) const {
  const RankView& rank = view(task);
  const ForwardInputs& in = inputs(task);
  const Block block = token_block(rank, task.block);
  const std::int64_t width = shape_.shared_intermediate;
  const Range columns = sum_columns(task.tile);
  if (width > 0) {
    const auto h = consecutive_rows(rank.buffers->shared_h.data() + block.first_row * width, width, block.count);
    product(h, {in.shared.w2 + columns.begin * width, width, WeightLayout::kOutputsByTerms}, static_cast<int>(width),
            columns.size, scratch, scratch.sums);
  }
  sum_slots(rank, block, in.topk_weights, columns, scratch, in.out);
}

}  // namespace clowder::cpu

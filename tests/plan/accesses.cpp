#include "accesses.h"

#include <algorithm>

namespace clowder::plan::explore {

void AccessList::begin() {
  for (Access& access : accesses_) {
    switch (access.mode) {
      case AccessMode::kRead:
        access.cell->begin_read(access.expected);
        break;
      case AccessMode::kWriteOnce:
        if (access.cell->tag != make_tag(Value::kBlank, 0)) {
          throw Violation("writes " + to_string(access.written) + " a second time");
        }
        access.cell->begin_write(access.written);
        break;
      case AccessMode::kUpdate:
        access.cell->begin_read(access.expected);
        access.cell->end_read();
        access.cell->begin_write(access.written);
        break;
      case AccessMode::kCopy:
        access.written = access.source->tag;
        access.source->begin_read(access.written);
        access.cell->begin_write(access.written);
        break;
      case AccessMode::kWrite:
        access.cell->begin_write(access.written);
        break;
    }
  }
}

void AccessList::end() {
  for (const Access& access : accesses_) {
    if (access.mode == AccessMode::kRead) {
      access.cell->end_read();
    } else {
      if (access.mode == AccessMode::kCopy) access.source->end_read();
      access.cell->end_write(access.written);
    }
  }
}

Tag x_tag(std::int32_t layer, std::int32_t rank, std::int64_t token) { return make_tag(Value::kX, layer, rank, token); }
Tag dy_tag(std::int32_t layer, std::int32_t rank, std::int64_t token) {
  return make_tag(Value::kDy, layer, rank, token);
}
Tag weights_tag(std::int32_t layer, std::int32_t rank, std::int64_t token) {
  return make_tag(Value::kWeights, layer, rank, token);
}

namespace {

// Whether column tile a of num_a and column tile b of num_b share columns.
bool tiles_overlap(std::int32_t a, std::int32_t num_a, std::int32_t b, std::int32_t num_b) {
  return a * num_b < (b + 1) * num_a && b * num_a < (a + 1) * num_b;
}

std::int32_t overlapping_tiles(std::int32_t tile, std::int32_t num_tiles, std::int32_t others) {
  std::int32_t count = 0;
  for (std::int32_t other = 0; other < others; ++other) count += tiles_overlap(tile, num_tiles, other, others) ? 1 : 0;
  return count;
}

// One task's accesses, written down kind by kind.
class Lister {
 public:
  Lister(const PassContext& context, const Task& task, AccessList& list)
      : spec_(*context.spec),
        memory_(*context.memory),
        shape_(*context.shape),
        pass_(*context.rank),
        schedule_(context.schedule),
        workspace_(memory_.rank(pass_.rank)),
        list_(list),
        instance_(context.instance),
        layer_index_(context.layer),
        ids_parity_(context.ids_parity),
        block_(task.block),
        tile_(task.tile),
        segment_(*task.segment) {
    if (shape_.pass != Pass::kSchedule) layer_ = &memory_.layer(layer_index_, pass_.rank);
  }

  void list() {
    switch (segment_.kind) {
      case TaskKind::kStageIds:
        return stage_ids();
      case TaskKind::kBuildSchedule:
        return build_schedule();
      case TaskKind::kStageInputs:
        return stage_inputs();
      case TaskKind::kPull:
        return shape_.pass == Pass::kForward ? pull_forward() : pull_backward();
      case TaskKind::kPublishDone:
      case TaskKind::kFinish:
        return;
      case TaskKind::kSharedUp:
        return shared_up();
      case TaskKind::kUp:
        return up();
      case TaskKind::kDown:
        return down();
      case TaskKind::kOut:
        return out();
      case TaskKind::kRecompute:
        return recompute();
      case TaskKind::kHidden:
        return hidden();
      case TaskKind::kInput:
        return input();
      case TaskKind::kWeight:
        return weight();
      case TaskKind::kSharedHidden:
        return shared_hidden();
      case TaskKind::kSharedWeight:
        return shared_weight();
      case TaskKind::kInputSum:
        return input_sum();
    }
  }

 private:
  // --- Schedule ---

  void stage_ids() { list_.write(workspace_.ids.at(ids_parity_), tag(Value::kIds)); }

  void build_schedule() {
    for (std::int32_t r = 0; r < spec_.schedule.num_ranks; ++r) {
      list_.read(memory_.rank(r).ids.at(ids_parity_), make_tag(Value::kIds, instance_, r));
    }
  }

  // --- Copies ---

  void stage_inputs() {
    if (!spec_.staged_inputs) return;
    for (std::int32_t token = 0; token < pass_.num_tokens; ++token) {
      // A backward that pulls no x may find that the caller has overwritten it, and stages whatever is there.
      list_.copy(layer_->x.at(token), workspace_.staged_x.at(token));
      if (shape_.pass == Pass::kForward) continue;
      list_.copy(layer_->dy.at(token), workspace_.staged_dy.at(token));
      list_.copy(layer_->weights.at(token), workspace_.staged_weights.at(token));
    }
  }

  void pull_forward() {
    read_source_x();
    list_.write(workspace_.x_ring.at(ring()), block_tag(Value::kPulledX, block_));
    if (has_kept_x(shape_, pass_, block_)) list_.write(layer_->kept_x.at(block_), kept_x_tag());
  }

  void pull_backward() {
    for_each_row([&](const RowSource& source) {
      const std::int32_t token = source.slot / spec_.schedule.topk;
      list_.read(source_dy(source.rank).at(token), dy_tag(layer_index_, source.rank, token));
      list_.read(source_weights(source.rank).at(token), weights_tag(layer_index_, source.rank, token));
    });
    list_.write(workspace_.dy_ring.at(ring()), block_tag(Value::kPulledDy, block_));
    list_.write(workspace_.weights_ring.at(ring()), block_tag(Value::kPulledWeights, block_));
    if (!pulls_x(shape_, pass_, block_)) return;
    if (has_kept_x(shape_, pass_, block_)) {
      list_.read(layer_->kept_x.at(block_), kept_x_tag());
    } else {
      read_source_x();
    }
    list_.write(workspace_.x_ring.at(ring()), block_tag(Value::kPulledX, block_));
  }

  // --- Forward ---

  void shared_up() {
    read_tokens(layer_->x, x_tag, block_);
    list_.write(workspace_.shared_hidden.at(block_, tile_), tag(Value::kSharedHidden, block_, tile_));
    list_.write(layer_->shared_gate_up.at(block_, tile_), layer_tag(Value::kSharedGateUp, block_, tile_));
  }

  void up() {
    list_.read(workspace_.x_ring.at(ring()), block_tag(Value::kPulledX, block_));
    list_.write(workspace_.hidden_ring.at(ring(), tile_), tag(Value::kHidden, block_, tile_));
    if (is_saved(shape_, pass_, block_)) {
      list_.write(layer_->saved_gate_up.at(block_, tile_), layer_tag(Value::kGateUp, block_, tile_));
    }
  }

  void down() {
    read_row(workspace_.hidden_ring, ring(), shape_.tiles.up, Value::kHidden, block_);
    push_rows();
  }

  void out() {
    read_tokens(layer_->weights, weights_tag, block_);
    read_slots(shape_.tiles.out, shape_.tiles.down);
    if (shape_.has_shared) {
      read_row(workspace_.shared_hidden, block_, shape_.tiles.shared_up, Value::kSharedHidden, block_);
    }
    list_.write_once(layer_->out.at(block_, tile_), tag(Value::kOut, block_, tile_));
  }

  // --- Backward ---

  void recompute() {
    list_.read(workspace_.x_ring.at(ring()), block_tag(Value::kPulledX, block_));
    list_.write(workspace_.gate_up_ring.at(ring(), tile_), tag(Value::kGateUp, block_, tile_));
  }

  void hidden() {
    list_.read(workspace_.dy_ring.at(ring()), block_tag(Value::kPulledDy, block_));
    list_.read(workspace_.weights_ring.at(ring()), block_tag(Value::kPulledWeights, block_));
    for (std::int32_t t = 0; t < shape_.tiles.up; ++t) {
      if (is_saved(shape_, pass_, block_)) {
        list_.read(layer_->saved_gate_up.at(block_, t), layer_tag(Value::kGateUp, block_, t));
      } else {
        list_.read(workspace_.gate_up_ring.at(ring(), t), tag(Value::kGateUp, block_, t));
      }
    }
    list_.write(workspace_.gradient_ring.at(ring(), tile_), tag(Value::kGradient, block_, tile_));
    list_.write(workspace_.weighted_ring.at(ring(), tile_), tag(Value::kWeightedHidden, block_, tile_));
    list_.write(workspace_.dw_ring.at(ring(), tile_), tag(Value::kDwPartial, block_, tile_));
  }

  void input() {
    if (shape_.needs.x) {
      read_row(workspace_.gradient_ring, ring(), shape_.tiles.hidden, Value::kGradient, block_);
      push_rows();
    }
    if (tile_ != 0 || !shape_.needs.topk_weights) return;
    read_row(workspace_.dw_ring, ring(), shape_.tiles.hidden, Value::kDwPartial, block_);
    for_each_row([&](const RowSource& source) {
      list_.write(memory_.rank(source.rank).dw_slots.at(source.slot),
                  make_tag(Value::kDwSlot, instance_, source.rank, source.slot));
    });
  }

  void weight() {
    const bool is_w13 = shape_.needs.w13 && tile_ < shape_.tiles.weight13;
    for (std::int32_t b = block_; b < block_ + segment_.num_blocks; ++b) {
      const std::int32_t slot = b % shape_.ring.ring_blocks;
      if (is_w13) {
        list_.read(workspace_.x_ring.at(slot), block_tag(Value::kPulledX, b));
        read_row(workspace_.gradient_ring, slot, shape_.tiles.hidden, Value::kGradient, b);
      } else {
        list_.read(workspace_.dy_ring.at(slot), block_tag(Value::kPulledDy, b));
        read_row(workspace_.weighted_ring, slot, shape_.tiles.hidden, Value::kWeightedHidden, b);
      }
    }
    carry();
    if (segment_.last_part) {
      list_.write_once(layer_->weight_gradient.at(segment_.expert, tile_),
                       tag(Value::kWeightGradient, segment_.expert, tile_));
    }
  }

  // A carry's tag names the expert and the first block that is still missing from the sum.
  void carry() {
    Cell& cell = workspace_.carry.at(tile_);
    const Tag before = tag(Value::kCarry, segment_.expert, block_);
    const Tag after = tag(Value::kCarry, segment_.expert, block_ + segment_.num_blocks);
    if (segment_.first_part && segment_.last_part) return;
    if (segment_.first_part) return list_.write(cell, after);
    if (segment_.last_part) return list_.read(cell, before);
    list_.update(cell, before, after);
  }

  void shared_hidden() {
    read_tokens(layer_->dy, dy_tag, block_);
    for (std::int32_t t = 0; t < shape_.tiles.shared_up; ++t) {
      list_.read(layer_->shared_gate_up.at(block_, t), layer_tag(Value::kSharedGateUp, block_, t));
    }
    list_.write(workspace_.shared_gradient.at(block_, tile_), tag(Value::kSharedGradient, block_, tile_));
    list_.write(workspace_.shared_weighted.at(block_, tile_), tag(Value::kSharedWeightedHidden, block_, tile_));
  }

  void shared_weight() {
    const bool is_w13 = shape_.needs.shared_w13 && tile_ < shape_.tiles.shared_weight13;
    const std::int32_t tiles = shape_.tiles.shared_hidden;
    for (std::int32_t b = 0; b < token_blocks(shape_, pass_); ++b) {
      if (is_w13) {
        read_tokens(layer_->x, x_tag, b);
        read_row(workspace_.shared_gradient, b, tiles, Value::kSharedGradient, b);
      } else {
        read_tokens(layer_->dy, dy_tag, b);
        read_row(workspace_.shared_weighted, b, tiles, Value::kSharedWeightedHidden, b);
      }
    }
    list_.write_once(layer_->shared_weight_gradient.at(tile_), tag(Value::kSharedWeightGradient, tile_));
  }

  void input_sum() {
    if (shape_.needs.x) {
      read_slots(shape_.tiles.input_sum, shape_.tiles.input);
      if (shape_.has_shared) {
        read_row(workspace_.shared_gradient, block_, shape_.tiles.shared_hidden, Value::kSharedGradient, block_);
      }
      list_.write_once(layer_->dx.at(block_, tile_), tag(Value::kDx, block_, tile_));
    }
    if (tile_ != 0 || !shape_.needs.topk_weights) return;
    for_each_routed_slot(
        [&](std::int32_t slot) { list_.read(workspace_.dw_slots.at(slot), tag(Value::kDwSlot, slot)); });
    list_.write_once(layer_->dw.at(block_), tag(Value::kDw, block_));
  }

  // --- Shared by several kinds ---

  std::int32_t ring() const { return block_ % shape_.ring.ring_blocks; }
  Tag tag(Value value, std::int64_t a = 0, std::int64_t b = 0) const {
    return make_tag(value, instance_, pass_.rank, a, b);
  }
  Tag layer_tag(Value value, std::int64_t a, std::int64_t b) const {
    return make_tag(value, layer_index_, pass_.rank, a, b);
  }
  Tag block_tag(Value value, std::int32_t block) const { return tag(value, block); }
  Tag kept_x_tag() const { return layer_tag(Value::kKeptX, block_, 0); }

  const Grid& source_x(std::int32_t rank) const {
    return spec_.staged_inputs ? memory_.rank(rank).staged_x : memory_.layer(layer_index_, rank).x;
  }
  const Grid& source_dy(std::int32_t rank) const {
    return spec_.staged_inputs ? memory_.rank(rank).staged_dy : memory_.layer(layer_index_, rank).dy;
  }
  const Grid& source_weights(std::int32_t rank) const {
    return spec_.staged_inputs ? memory_.rank(rank).staged_weights : memory_.layer(layer_index_, rank).weights;
  }

  template <class Visit>
  void for_each_row(Visit&& visit) const {
    const std::int32_t begin = pass_.blocks.block_row_begin[block_];
    const std::int32_t end = pass_.blocks.block_row_end(block_);
    for (std::int32_t row = begin; row < end; ++row) visit(schedule_.source(row));
  }

  template <class Visit>
  void for_each_token(std::int32_t token_block, Visit&& visit) const {
    const std::int32_t begin = token_block * shape_.ring.block_rows;
    const std::int32_t end = std::min(pass_.num_tokens, begin + shape_.ring.block_rows);
    for (std::int32_t token = begin; token < end; ++token) visit(token);
  }

  template <class Visit>
  void for_each_routed_slot(Visit&& visit) const {
    const std::int32_t topk = spec_.schedule.topk;
    for_each_token(block_, [&](std::int32_t token) {
      for (std::int32_t k = 0; k < topk; ++k) {
        if (schedule_.has_route(token, k)) visit(token * topk + k);
      }
    });
  }

  void read_source_x() {
    for_each_row([&](const RowSource& source) {
      const std::int32_t token = source.slot / spec_.schedule.topk;
      list_.read(source_x(source.rank).at(token), x_tag(layer_index_, source.rank, token));
    });
  }

  void read_tokens(const Grid& grid, Tag (*token_tag)(std::int32_t, std::int32_t, std::int64_t), std::int32_t block) {
    for_each_token(block,
                   [&](std::int32_t token) { list_.read(grid.at(token), token_tag(layer_index_, pass_.rank, token)); });
  }

  void read_row(const Grid& grid, std::int32_t row, std::int32_t tiles, Value value, std::int32_t block) {
    for (std::int32_t t = 0; t < tiles; ++t) list_.read(grid.at(row, t), tag(value, block, t));
  }

  void push_rows() {
    for_each_row([&](const RowSource& source) {
      list_.write(memory_.rank(source.rank).slots.at(source.slot, tile_),
                  make_tag(Value::kSlot, instance_, source.rank, source.slot, tile_));
    });
  }

  void read_slots(std::int32_t own_tiles, std::int32_t pushed_tiles) {
    for (std::int32_t t = 0; t < pushed_tiles; ++t) {
      if (!tiles_overlap(tile_, own_tiles, t, pushed_tiles)) continue;
      for_each_routed_slot(
          [&](std::int32_t slot) { list_.read(workspace_.slots.at(slot, t), tag(Value::kSlot, slot, t)); });
    }
  }

  const PlanSpec& spec_;
  Memory& memory_;
  const PassShape& shape_;
  const RankPass& pass_;
  const ConstSchedule& schedule_;
  Workspace& workspace_;
  AccessList& list_;
  std::int32_t instance_;
  std::int32_t layer_index_;
  std::int32_t ids_parity_;
  std::int32_t block_;
  std::int32_t tile_;
  const Segment& segment_;
  LayerMemory* layer_ = nullptr;
};

// Calls visit(cell, tag when the pass has ended) for every output of the rank's pass.
template <class Visit>
void for_each_output(const PassContext& context, Visit&& visit) {
  const PassShape& shape = *context.shape;
  const RankPass& rank = *context.rank;
  const LayerMemory& layer = context.memory->layer(context.layer, rank.rank);
  const auto visit_grid = [&](const Grid& grid, std::int32_t rows, std::int32_t columns, Value value) {
    for (std::int32_t i = 0; i < rows; ++i) {
      for (std::int32_t j = 0; j < columns; ++j) {
        visit(grid.at(i, j), make_tag(value, context.instance, rank.rank, i, j));
      }
    }
  };
  const std::int32_t tokens = token_blocks(shape, rank);
  if (shape.pass == Pass::kForward) {
    visit_grid(layer.out, tokens, shape.tiles.out, Value::kOut);
    return;
  }
  if (shape.needs.x) visit_grid(layer.dx, tokens, shape.tiles.input_sum, Value::kDx);
  if (shape.needs.topk_weights) visit_grid(layer.dw, tokens, 1, Value::kDw);
  visit_grid(layer.weight_gradient, rank.blocks.num_experts, shape.weight_tiles(), Value::kWeightGradient);
  if (shape.needs_shared_weights()) {
    visit_grid(layer.shared_weight_gradient, shape.shared_weight_tiles(), 1, Value::kSharedWeightGradient);
  }
}

void check_reads(const Cell& cell, Tag tag, std::int32_t times) {
  if (cell.tag == tag && cell.reads == times) return;
  throw Violation(to_string(tag) + " was read " + std::to_string(cell.reads) + " times, not " + std::to_string(times) +
                  "; there stands " + to_string(cell.tag));
}

void check_slot_reads(const PassContext& context, std::int32_t slot) {
  const PassShape& shape = *context.shape;
  const Workspace& workspace = context.memory->rank(context.rank->rank);
  const bool is_forward = shape.pass == Pass::kForward;
  const std::int32_t pushed = is_forward ? shape.tiles.down : (shape.needs.x ? shape.tiles.input : 0);
  const std::int32_t readers = is_forward ? shape.tiles.out : shape.tiles.input_sum;
  for (std::int32_t t = 0; t < pushed; ++t) {
    check_reads(workspace.slots.at(slot, t), make_tag(Value::kSlot, context.instance, context.rank->rank, slot, t),
                overlapping_tiles(t, pushed, readers));
  }
  if (!is_forward && shape.needs.topk_weights) {
    check_reads(workspace.dw_slots.at(slot), make_tag(Value::kDwSlot, context.instance, context.rank->rank, slot), 1);
  }
}

}  // namespace

void list_accesses(const PassContext& context, const Task& task, AccessList& list) {
  Lister(context, task, list).list();
}

void allocate_saved(const PassContext& context) {
  if (context.shape->pass != Pass::kForward) return;
  LayerMemory& layer = context.memory->layer(context.layer, context.rank->rank);
  layer.saved_gate_up = context.memory->arena.grid(context.rank->blocks.num_blocks, context.spec->tiles.up);
  layer.kept_x = context.memory->arena.grid(context.rank->blocks.num_blocks);
}

void list_preparation(const PassContext& context, AccessList& list) {
  const std::int32_t rank = context.rank->rank;
  const LayerMemory& layer = context.memory->layer(context.layer, rank);
  for (std::int32_t token = 0; token < context.rank->num_tokens; ++token) {
    if (context.shape->pass == Pass::kForward) {
      list.write(layer.x.at(token), x_tag(context.layer, rank, token));
      list.write(layer.weights.at(token), weights_tag(context.layer, rank, token));
    } else {
      list.write(layer.dy.at(token), dy_tag(context.layer, rank, token));
    }
  }
  for_each_output(context, [&](Cell& cell, Tag) { list.write(cell, make_tag(Value::kBlank, 0)); });
}

void list_return(const PassContext& context, AccessList& list) {
  const LayerMemory& layer = context.memory->layer(context.layer, context.rank->rank);
  const bool is_forward = context.shape->pass == Pass::kForward;
  const bool is_x_free = !is_forward || context.spec->is_x_free_after_forward(context.layer);
  for (std::int32_t token = 0; token < context.rank->num_tokens; ++token) {
    if (is_x_free) list.write(layer.x.at(token), 0);
    if (is_forward) continue;
    list.write(layer.dy.at(token), 0);
    list.write(layer.weights.at(token), 0);
  }
  for_each_output(context, [&](Cell& cell, Tag) { list.write(cell, 0); });
}

void check_outputs(const PassContext& context) {
  for_each_output(context, [](const Cell& cell, Tag tag) {
    if (cell.tag != tag) throw Violation(to_string(tag) + " was never written");
  });
  // Valid routes are counted from the ids themselves, not from the schedule.
  const Routing& routing =
      context.spec
          ->steps[static_cast<std::size_t>(context.spec->program[static_cast<std::size_t>(context.instance)].step)];
  const std::vector<std::int32_t>& ids = routing.topk_idx[static_cast<std::size_t>(context.rank->rank)];
  for (std::size_t slot = 0; slot < ids.size(); ++slot) {
    if (is_expert(ids[slot], context.spec->schedule.num_experts)) {
      check_slot_reads(context, static_cast<std::int32_t>(slot));
    }
  }
}

}  // namespace clowder::plan::explore

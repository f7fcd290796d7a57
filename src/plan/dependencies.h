// What each task waits for before it starts, and what it signals when it has ended: the whole protocol, as data.
//
// A visitor has
//   counter(CounterKind kind, std::int64_t index, std::int32_t at_least)   wait: the rank's own counter has got there
//   flags(FlagKind kind)                                                   wait: every rank has raised it this epoch
// for visit_waits, and for visit_signals
//   counter(CounterKind kind, std::int64_t index)                          add one to the rank's own counter
//   flags(FlagKind kind)                                                   raise the flag at every rank
// A wait acquires and a signal releases.
#pragma once

#include "plan/pass.h"

namespace clowder::plan {

// A forward pull may overwrite the ring slot of block b - ring once that block's gate/up tiles have read x.
template <class Visitor>
CLOWDER_HD inline void visit_forward_waits(const PassShape& shape, const RankPass& rank, const Task& task,
                                           Visitor& visitor) {
  const TileCounts& tiles = shape.tiles;
  const std::int32_t block = task.block;
  const std::int32_t reused = block - shape.ring.ring_blocks;
  switch (task.kind()) {
    case TaskKind::kPull:
      visitor.flags(FlagKind::kInputsReady);
      if (reused >= 0) visitor.counter(CounterKind::kUp, reused, tiles.up);
      break;
    case TaskKind::kUp:
      if (shape.pull_pieces > 0) visitor.counter(CounterKind::kPulled, block, shape.pull_pieces);
      if (reused >= 0) visitor.counter(CounterKind::kDown, reused, tiles.down);
      break;
    case TaskKind::kDown:
      visitor.counter(CounterKind::kUp, block, tiles.up);
      break;
    case TaskKind::kOut:
      if (shape.has_shared) visitor.counter(CounterKind::kSharedUp, block, tiles.shared_up);
      visitor.flags(FlagKind::kDone);
      break;
    case TaskKind::kPublishDone:
      visitor.counter(CounterKind::kRemoteWork, 0, rank.num_remote_tasks);
      break;
    case TaskKind::kFinish:
      visitor.flags(FlagKind::kDone);
      break;
    default:
      break;
  }
}

// The last reader of what a pull brought (x, dy, weights) is the block's weight gradients, which follow its hidden
// gradient; without weight gradients it is the hidden gradient itself.
template <class Visitor>
CLOWDER_HD inline void visit_pulled_rows_free(const PassShape& shape, const RankPass& rank, std::int32_t block,
                                              Visitor& visitor) {
  if (shape.needs_routed_weights()) {
    visitor.counter(CounterKind::kWeight, rank.weight_segment_of_block[block], shape.weight_tiles());
  } else {
    visitor.counter(CounterKind::kHidden, block, shape.tiles.hidden);
  }
}

template <class Visitor>
CLOWDER_HD inline void visit_backward_waits(const PassShape& shape, const RankPass& rank, const Task& task,
                                            Visitor& visitor) {
  const TileCounts& tiles = shape.tiles;
  const std::int32_t block = task.block;
  const std::int32_t reused = block - shape.ring.ring_blocks;
  switch (task.kind()) {
    case TaskKind::kPull:
      visitor.flags(FlagKind::kInputsReady);
      if (reused >= 0) visit_pulled_rows_free(shape, rank, reused, visitor);
      break;
    case TaskKind::kRecompute:
      visitor.counter(CounterKind::kPulled, block, shape.pull_pieces);
      break;
    case TaskKind::kHidden:
      visitor.counter(CounterKind::kPulled, block, shape.pull_pieces);
      if (!is_saved(shape, rank, block)) visitor.counter(CounterKind::kUp, block, tiles.up);
      if (reused >= 0 && shape.input_tiles() > 0) visitor.counter(CounterKind::kInput, reused, shape.input_tiles());
      break;
    case TaskKind::kInput:
      visitor.counter(CounterKind::kHidden, block, tiles.hidden);
      break;
    case TaskKind::kWeight:
      for (std::int32_t b = block; b < block + task.segment->num_blocks; ++b) {
        visitor.counter(CounterKind::kHidden, b, tiles.hidden);
      }
      if (task.segment->carry_index > 0) visitor.counter(CounterKind::kCarry, task.tile, task.segment->carry_index);
      break;
    case TaskKind::kSharedWeight:
      for (std::int32_t b = 0; b < task.segment->num_blocks; ++b) {
        visitor.counter(CounterKind::kSharedUp, b, tiles.shared_hidden);
      }
      break;
    case TaskKind::kInputSum:
      if (shape.has_shared && shape.needs.x) visitor.counter(CounterKind::kSharedUp, block, tiles.shared_hidden);
      visitor.flags(FlagKind::kDone);
      break;
    case TaskKind::kPublishDone:
      visitor.counter(CounterKind::kRemoteWork, 0, rank.num_remote_tasks);
      break;
    case TaskKind::kFinish:
      visitor.flags(FlagKind::kDone);
      break;
    default:
      break;
  }
}

template <class Visitor>
CLOWDER_HD inline void visit_waits(const PassShape& shape, const RankPass& rank, const Task& task, Visitor& visitor) {
  switch (shape.pass) {
    case Pass::kSchedule:
      if (task.kind() == TaskKind::kBuildSchedule) visitor.flags(FlagKind::kIdsReady);
      break;
    case Pass::kForward:
      visit_forward_waits(shape, rank, task, visitor);
      break;
    case Pass::kBackward:
      visit_backward_waits(shape, rank, task, visitor);
      break;
  }
}

template <class Visitor>
CLOWDER_HD inline void visit_signals(const Task& task, Visitor& visitor) {
  switch (task.kind()) {
    case TaskKind::kStageIds:
      visitor.flags(FlagKind::kIdsReady);
      break;
    case TaskKind::kStageInputs:
      visitor.flags(FlagKind::kInputsReady);
      break;
    case TaskKind::kPull:
      visitor.counter(CounterKind::kPulled, task.block);
      visitor.counter(CounterKind::kRemoteWork, 0);
      break;
    case TaskKind::kPublishDone:
      visitor.flags(FlagKind::kDone);
      break;
    case TaskKind::kUp:
    case TaskKind::kRecompute:
      visitor.counter(CounterKind::kUp, task.block);
      break;
    case TaskKind::kDown:
      visitor.counter(CounterKind::kDown, task.block);
      visitor.counter(CounterKind::kRemoteWork, 0);
      break;
    case TaskKind::kHidden:
      visitor.counter(CounterKind::kHidden, task.block);
      break;
    case TaskKind::kInput:
      visitor.counter(CounterKind::kInput, task.block);
      visitor.counter(CounterKind::kRemoteWork, 0);
      break;
    case TaskKind::kWeight:
      visitor.counter(CounterKind::kWeight, task.segment->weight_segment);
      if (task.segment->uses_carry()) visitor.counter(CounterKind::kCarry, task.tile);
      break;
    case TaskKind::kSharedUp:
    case TaskKind::kSharedHidden:
      visitor.counter(CounterKind::kSharedUp, task.block);
      break;
    case TaskKind::kBuildSchedule:
    case TaskKind::kFinish:
    case TaskKind::kOut:
    case TaskKind::kSharedWeight:
    case TaskKind::kInputSum:
      break;
  }
}

}  // namespace clowder::plan

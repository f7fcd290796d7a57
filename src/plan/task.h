// The words of a plan: task kinds, the counters and flags that order them, segments of equal tasks, and tickets.
#pragma once

#include <cstdint>

#include "model/host_device.h"

namespace clowder::plan {

enum class Pass : std::int32_t { kSchedule, kForward, kBackward };

const char* to_string(Pass pass);

enum class TaskKind : std::int32_t {
  // Copy tasks.
  kStageIds,       // publish this rank's T_r and topk_idx
  kBuildSchedule,  // pull every rank's ids and build the schedule
  kStageInputs,    // publish this rank's x (backward: x, dy, topk_weights)
  kPull,           // one row block from its source ranks into the ring
  kPublishDone,    // tell the peers that this rank has pulled and pushed everything
  kFinish,         // wait until every peer is done
  // Forward math tasks.
  kSharedUp,  // shared expert's gate and up, with the activation
  kUp,        // gate and up of a row block, with the activation
  kDown,      // down of a row block, pushed to the source ranks
  kOut,       // out of a token block: shared expert's down (if any) plus the token's slots
  // Backward math tasks.
  kRecompute,     // gate and up of a row block that was not saved
  kHidden,        // hidden gradient of a row block: [dg,du], wh and the partials of dw
  kInput,         // input gradient of a row block, pushed with dw to the source ranks
  kWeight,        // weight gradients of one expert over a run of its row blocks
  kSharedHidden,  // hidden gradient of the shared expert
  kSharedWeight,  // weight gradients of the shared expert
  kInputSum,      // dx of a token block: shared expert's part (if any) plus the token's slots; and dtopk_weights
};
inline constexpr int kNumTaskKinds = static_cast<int>(TaskKind::kInputSum) + 1;

const char* to_string(TaskKind kind);

// Counters are local to a rank, count finished tasks, and are zero when a pass begins.
enum class CounterKind : std::int32_t {
  kPulled,      // per row block: pieces that stand in the ring
  kUp,          // per row block: gate/up tiles (in backward: recomputed ones)
  kDown,        // per row block: down tiles
  kHidden,      // per row block: hidden-gradient tiles
  kInput,       // per row block: input-gradient tiles
  kWeight,      // per weight segment: weight-gradient tiles
  kCarry,       // per weight-gradient tile: partial segments that have gone through its carry
  kSharedUp,    // per token block: shared gate/up tiles (in backward: shared hidden-gradient tiles)
  kRemoteWork,  // one: pulls and pushing tiles, the tasks that touch peers
};
inline constexpr int kNumCounterKinds = static_cast<int>(CounterKind::kRemoteWork) + 1;

// Flags cross ranks. Each stands in the reader's memory, has one writer, and holds the writer's epoch.
enum class FlagKind : std::int32_t { kIdsReady, kInputsReady, kDone };
inline constexpr int kNumFlagKinds = static_cast<int>(FlagKind::kDone) + 1;

const char* to_string(FlagKind kind);

// A run of tasks of one kind, rank and expert that stand one after the other in a queue. Tasks of a segment are ordered
// tile by tile, and block by block within a tile, so that neighbours share a weight tile. Pulls go block by block, and
// piece by piece within a block, so that the first block is there early.
struct Segment {
  std::int64_t first_ticket = 0;
  TaskKind kind = TaskKind::kFinish;
  std::int32_t rank = 0;         // index into the ranks of this queue
  std::int32_t first_block = 0;  // row block or token block
  std::int32_t num_blocks = 0;
  std::int32_t num_tiles = 0;  // column tiles, or pieces of a pull
  std::int32_t expert = -1;    // of the rank; -1 where there is none
  // Of kWeight only.
  std::int32_t weight_segment = -1;  // its number among the rank's kWeight segments
  std::int32_t carry_index = -1;     // partial segments of this rank before it; -1 when it is the expert's only one
  bool first_part = true;            // sums start at zero; otherwise at the carry
  bool last_part = true;             // sums go to the gradient; otherwise to the carry

  // A weight-gradient task walks all blocks of its segment; every other task works on one.
  CLOWDER_HD std::int64_t num_tasks() const {
    return kind == TaskKind::kWeight || kind == TaskKind::kSharedWeight ? num_tiles
                                                                        : std::int64_t{num_blocks} * num_tiles;
  }
  CLOWDER_HD bool uses_carry() const { return !(first_part && last_part); }
};

struct Task {
  const Segment* segment = nullptr;
  std::int32_t block = 0;  // the segment's first block for weight gradients
  std::int32_t tile = 0;

  CLOWDER_HD TaskKind kind() const { return segment->kind; }
  CLOWDER_HD std::int32_t rank() const { return segment->rank; }
};

// One queue in plan order. Segments are never empty.
struct Queue {
  const Segment* segments = nullptr;
  std::int64_t num_segments = 0;
  std::int64_t num_tickets = 0;
};

// Turns a ticket into its task. A taker's tickets only grow, so it keeps `cursor`, the segment of its last ticket
// (0 at first), and the search is O(1) amortised.
CLOWDER_HD inline Task find_task(const Queue& queue, std::int64_t ticket, std::int64_t& cursor) {
  while (cursor + 1 < queue.num_segments && queue.segments[cursor + 1].first_ticket <= ticket) ++cursor;
  const Segment& segment = queue.segments[cursor];
  const std::int64_t index = ticket - segment.first_ticket;
  Task task;
  task.segment = &segment;
  if (segment.kind == TaskKind::kWeight || segment.kind == TaskKind::kSharedWeight) {
    task.block = segment.first_block;
    task.tile = static_cast<std::int32_t>(index);
  } else if (segment.kind == TaskKind::kPull) {
    task.block = segment.first_block + static_cast<std::int32_t>(index / segment.num_tiles);
    task.tile = static_cast<std::int32_t>(index % segment.num_tiles);
  } else {
    task.block = segment.first_block + static_cast<std::int32_t>(index % segment.num_blocks);
    task.tile = static_cast<std::int32_t>(index / segment.num_blocks);
  }
  return task;
}

}  // namespace clowder::plan

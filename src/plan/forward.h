// The forward pass as tasks.
//
// Math queue: the shared expert's gate/up first, which hides the first pulls; per chunk q the gate/up tiles of q, then
// the down tiles of q-1; last the out tiles of all ranks, whose shared-expert part hides the last pushes.
#pragma once

#include "plan/pass.h"

namespace clowder::plan {

template <class Sink>
CLOWDER_HD inline void emit_forward(const PassShape& shape, RankPass* ranks, std::int32_t num_ranks, Sink& sink) {
  emit_copies(shape, ranks, num_ranks, shape.pull_pieces > 0, sink);

  for (std::int32_t r = 0; r < num_ranks; ++r) {
    ranks[r].num_remote_tasks = ranks[r].blocks.num_blocks * (shape.pull_pieces + shape.tiles.down);
    if (shape.has_shared) emit_tokens(shape, sink, TaskKind::kSharedUp, r, ranks[r], shape.tiles.shared_up);
  }
  const std::int32_t chunks = most_chunks(ranks, num_ranks);
  for (std::int32_t q = 0; q <= chunks; ++q) {
    for (std::int32_t r = 0; r < num_ranks; ++r) emit_chunk(sink, TaskKind::kUp, r, ranks[r], q, shape.tiles.up);
    for (std::int32_t r = 0; r < num_ranks; ++r) {
      emit_chunk(sink, TaskKind::kDown, r, ranks[r], q - 1, shape.tiles.down);
    }
  }
  for (std::int32_t r = 0; r < num_ranks; ++r) {
    emit_tokens(shape, sink, TaskKind::kOut, r, ranks[r], shape.tiles.out);
  }
}

}  // namespace clowder::plan

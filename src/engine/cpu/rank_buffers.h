// One rank's own workspace memory. Rings are indexed by row block modulo ring_blocks.
#pragma once

#include "clowder/types.h"
#include "engine/cpu/buffer.h"
#include "engine/cpu/tiles.h"

namespace clowder::cpu {

struct RankBuffers {
  // Rings, rows of: both passes
  Buffer<bf16> x;  // [H]
  // forward
  Buffer<bf16> h;  // [I]
  // backward
  Buffer<bf16> dy;                // [H]
  Buffer<float> weights;          // [1]
  Buffer<bf16> gate_up;           // [2I] g, then u, recomputed
  Buffer<bf16> gate_up_gradient;  // [2I] dg, then du
  Buffer<bf16> weighted_hidden;   // [I]
  Buffer<float> dw_partials;      // [hidden tiles] of each row, tile by tile: [ring_blocks][hidden tiles][kBlockRows]

  Buffer<float> carry;  // [weight tiles][kWeightTile * kWeightTile] sums of an expert's partial segments

  // The shared expert's, for all tokens.
  Buffer<bf16> shared_h;                 // [max_tokens, Is]
  Buffer<bf16> shared_gate_up_gradient;  // [max_tokens, 2Is]
  Buffer<bf16> shared_weighted_hidden;   // [max_tokens, Is]

  void reserve_forward(const LayerShape& shape, std::int64_t ring_rows);
  void reserve_backward(const LayerShape& shape, const plan::PassShape& pass);
  void poison();
  // Reserved so far.
  std::int64_t bytes() const;
};

}  // namespace clowder::cpu

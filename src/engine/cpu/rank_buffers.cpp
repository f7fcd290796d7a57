#include "engine/cpu/rank_buffers.h"

namespace clowder::cpu {

void RankBuffers::reserve_forward(const LayerShape& shape, std::int64_t ring_rows) {
  x.reserve(ring_rows * shape.hidden);
  h.reserve(ring_rows * shape.intermediate);
  shared_h.reserve(shape.max_tokens * shape.shared_intermediate);
}

void RankBuffers::reserve_backward(const LayerShape& shape, const plan::PassShape& pass) {
  const std::int64_t ring_rows = std::int64_t{pass.ring.ring_blocks} * kBlockRows;
  x.reserve(ring_rows * shape.hidden);
  dy.reserve(ring_rows * shape.hidden);
  weights.reserve(ring_rows);
  gate_up.reserve(ring_rows * 2 * shape.intermediate);
  gate_up_gradient.reserve(ring_rows * 2 * shape.intermediate);
  weighted_hidden.reserve(ring_rows * shape.intermediate);
  dw_partials.reserve(ring_rows * pass.tiles.hidden);
  carry.reserve(std::int64_t{pass.weight_tiles()} * kWeightTile * kWeightTile);
  shared_gate_up_gradient.reserve(shape.max_tokens * 2 * shape.shared_intermediate);
  shared_weighted_hidden.reserve(shape.max_tokens * shape.shared_intermediate);
}

void RankBuffers::poison() {
  for (Buffer<bf16>* buffer : {&x, &h, &dy, &gate_up, &gate_up_gradient, &weighted_hidden, &shared_h,
                               &shared_gate_up_gradient, &shared_weighted_hidden}) {
    buffer->poison();
  }
  for (Buffer<float>* buffer : {&weights, &dw_partials, &carry}) buffer->poison();
}

std::int64_t RankBuffers::bytes() const {
  std::int64_t sum = 0;
  for (const Buffer<bf16>* buffer : {&x, &h, &dy, &gate_up, &gate_up_gradient, &weighted_hidden, &shared_h,
                                     &shared_gate_up_gradient, &shared_weighted_hidden}) {
    sum += buffer->bytes();
  }
  for (const Buffer<float>* buffer : {&weights, &dw_partials, &carry}) sum += buffer->bytes();
  return sum;
}

}  // namespace clowder::cpu

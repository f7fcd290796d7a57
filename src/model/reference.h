// The layer in fp64: what every engine is compared with. Nothing is rounded, except that a clamp takes its masks from g
// and u rounded to bf16, in its value and in its derivatives, as engines do.
//
// It knows no ranks: tensors are those of the global batch, all ranks' tokens one after the other.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "clowder/types.h"

namespace clowder {

// T = topk_idx.size() / K. Ids outside [0, E) are no route.
struct ReferenceInputs {
  LayerShape shape;
  std::span<const bf16> x;                 // [T, H]
  std::span<const std::int32_t> topk_idx;  // [T, K]
  std::span<const float> topk_weights;     // [T, K]
  std::span<const bf16> w13;               // [E, 2I, H], gate rows first
  std::span<const bf16> w2;                // [E, H, I]
  std::span<const bf16> shared_w13;        // [2Is, H]
  std::span<const bf16> shared_w2;         // [H, Is]
  std::span<const bf16> dout;              // [T, H]
  bool forward_only = false;               // dout is not read
};

// An element of dg or du that an engine may rightly take on the other side of a corner: its g or u, summed in fp32, may
// round to another bf16 value than the exact one. Forward is continuous there and does not tell.
struct OpenChoice {
  std::int32_t expert = 0;  // -1: the shared expert
  std::int64_t token = 0;   // of the global batch
  std::int64_t output = 0;  // row of w13: below I of dg, then of du
  double difference = 0.0;  // of the gradient on the other side
};

// Gradients are empty where forward alone was asked for.
struct ReferenceResults {
  std::vector<double> out;            // [T, H]
  std::vector<double> dx;             // [T, H]
  std::vector<double> dtopk_weights;  // [T, K], 0 where a slot has no route
  std::vector<double> dw13;           // [E, 2I, H]
  std::vector<double> dw2;            // [E, H, I]
  std::vector<double> dshared_w13;    // [2Is, H], of all tokens
  std::vector<double> dshared_w2;     // [H, Is]
  std::vector<OpenChoice> choices;    // taken in dx, dw13 and dshared_w13 as the exact g and u have it
};

// The same bits for any number of threads.
ReferenceResults compute_reference(const ReferenceInputs& inputs, int threads);

}  // namespace clowder

// The layer behind plain functions, so that a benchmark in Python can time it beside its peers on the same tensors.
// Addresses are the device's; functions return 0, or 1 with the reason in clowder_bench_error().
#include "clowder/layer.h"

#include <cstdint>
#include <memory>
#include <string>

#include "model/activation/name.h"

namespace {

std::string last_error;

template <class Function>
int guarded(Function&& function) {
  try {
    function();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

}  // namespace

extern "C" {
#pragma GCC visibility push(default)

// Stacked weights: w13 [E, 2I, H], w2 [E, H, I], shared_w13 [2Is, H], shared_w2 [H, Is].
struct BenchLayer {
  std::int64_t hidden, intermediate, shared_intermediate, num_experts, topk, max_tokens;
  std::int64_t ring_rows, saved_rows, chunk_rows, blocks;  // -1: default
  const char* activation;
};

struct BenchTensors {
  const std::int64_t* topk_idx;
  const clowder::bf16* x;
  const float* topk_weights;
  const clowder::bf16 *w13, *w2, *shared_w13, *shared_w2;
  clowder::bf16* out;
  clowder::bf16 *gate_up, *shared_gate_up;  // saved, or null
  std::int32_t* schedule;
  std::int64_t tokens;
};

const char* clowder_bench_error() { return last_error.c_str(); }

void* clowder_bench_create(const BenchLayer* layer) {
  clowder::Workspace* workspace = nullptr;
  guarded([&] {
    clowder::LayerShape shape;
    shape.hidden = layer->hidden;
    shape.intermediate = layer->intermediate;
    shape.shared_intermediate = layer->shared_intermediate;
    shape.num_experts = static_cast<std::int32_t>(layer->num_experts);
    shape.topk = static_cast<std::int32_t>(layer->topk);
    shape.max_tokens = layer->max_tokens;
    shape.activation = clowder::parse_activation(layer->activation);
    clowder::WorkspaceOptions options;
    options.engine = clowder::EngineKind::kSm90;
    options.ring_rows = layer->ring_rows;
    options.saved_rows = layer->saved_rows;
    options.chunk_rows = layer->chunk_rows;
    options.blocks = static_cast<std::int32_t>(layer->blocks);
    workspace = new clowder::Workspace(shape, clowder::make_virtual_group(1), options);
  });
  return workspace;
}

void clowder_bench_destroy(void* workspace) { delete static_cast<clowder::Workspace*>(workspace); }
std::int64_t clowder_bench_schedule_words(void* workspace) {
  return static_cast<clowder::Workspace*>(workspace)->schedule_words();
}
std::int64_t clowder_bench_saved_rows(void* workspace) {
  return static_cast<clowder::Workspace*>(workspace)->saved_rows();
}

int clowder_bench_schedule(void* workspace, const BenchTensors* t, void* stream) {
  return guarded([&] {
    static_cast<clowder::Workspace*>(workspace)->build_schedule({{t->topk_idx, true, t->tokens}}, {t->schedule},
                                                                stream);
  });
}

int clowder_bench_forward(void* handle, const BenchTensors* t, void* stream) {
  return guarded([&] {
    auto& workspace = *static_cast<clowder::Workspace*>(handle);
    const clowder::LayerShape& shape = workspace.shape();
    clowder::ForwardInputs inputs;
    inputs.schedule = t->schedule;
    inputs.x = t->x;
    inputs.topk_weights = t->topk_weights;
    const std::int64_t size = shape.intermediate * shape.hidden;
    for (std::int64_t e = 0; e < shape.num_experts; ++e) {
      inputs.experts.push_back({t->w13 + 2 * e * size, t->w13 + (2 * e + 1) * size, t->w2 + e * size});
    }
    const std::int64_t shared = shape.shared_intermediate * shape.hidden;
    if (shared > 0) inputs.shared = {t->shared_w13, t->shared_w13 + shared, t->shared_w2};
    inputs.out = t->out;
    inputs.saved = {t->gate_up, nullptr, t->shared_gate_up};
    workspace.forward({inputs}, stream);
  });
}

int clowder_bench_check(void* workspace) {
  return guarded([&] { static_cast<clowder::Workspace*>(workspace)->check(); });
}

#pragma GCC visibility pop
}  // extern "C"

// The determinism contract, bit by bit, forward and every gradient.
#include <gtest/gtest.h>

#include "engine/layer_case.h"
#include "model/bf16.h"

namespace clowder::test {
namespace {

using check::ProblemSpec;
using check::RowCount;
using check::RunOptions;

ProblemSpec small_layer() {
  ProblemSpec spec;
  spec.tokens_per_rank = {261};
  spec.hidden = 96;
  spec.intermediate = 160;  // two hidden tiles, the second one narrow
  spec.num_experts = 8;
  spec.topk = 3;
  spec.drop = 0.1;
  return spec;
}

// Everything that tuning may change.
std::vector<RunOptions> tunings() {
  std::vector<RunOptions> list(1);
  const auto add = [&](auto change) {
    list.emplace_back();
    change(list.back());
  };
  for (const char* ring : {"min", "1/8", "1/2", "full"}) {
    add([&](RunOptions& o) { o.ring_rows = check::parse_ring_rows(ring); });
  }
  for (const char* saved : {"0", "1", "1/3", "all"}) {
    add([&](RunOptions& o) { o.saved_rows = check::parse_saved_rows(saved); });
  }
  for (const std::int64_t chunk : {1, 32, 96, 100000}) {
    add([&](RunOptions& o) { o.workspace.chunk_rows = chunk; });
  }
  for (const std::int32_t blocks : {1, 2, 3, 7}) {
    add([&](RunOptions& o) { o.workspace.blocks = blocks; });
  }
  add([](RunOptions& o) { o.workspace.keep_x = true; });
  for (const char* saved : {"0", "1/3"}) {
    add([&](RunOptions& o) {
      o.ring_rows = check::parse_ring_rows("min");
      o.saved_rows = check::parse_saved_rows(saved);
      o.workspace.keep_x = true;
      o.workspace.blocks = 3;
      o.jitter = true;
    });
  }
  return list;
}

TEST(Determinism, D1RunToRun) {
  for (const int ranks : {1, 4}) {
    ProblemSpec spec = on_ranks(small_layer(), ranks);
    spec.shared_intermediate = 64;
    RunOptions options;
    options.repeat = scaled(10, 3);
    options.workspace.blocks = 3;
    expect_ok(spec, options);
    options.jitter = true;
    expect_ok(spec, options);
  }
}

TEST(Determinism, D2WhateverTheTuning) {
  for (const GradientMode mode : {GradientMode::kWriteBf16, GradientMode::kWriteFp32, GradientMode::kAccumulateFp32,
                                  GradientMode::kAccumulateBf16}) {
    ProblemSpec spec = on_ranks(small_layer(), {90, 0, 170, 1});
    spec.shared_intermediate = 96;
    spec.routing = check::parse_routing("zipf:1");
    spec.gradient_mode = mode;
    const Digests expected = expect_ok(spec);
    for (const RunOptions& options : tunings()) EXPECT_EQ(expect_ok(spec, options), expected);
  }
}

TEST(Determinism, D3WhateverTheNumberOfRanks) {
  for (const std::int64_t shared : {0, 64}) {
    ProblemSpec spec = small_layer();
    spec.shared_intermediate = shared;
    const Digests expected = without_shared_gradients(expect_ok(spec));
    for (const int ranks : {2, 4, 8}) {
      EXPECT_EQ(without_shared_gradients(expect_ok(on_ranks(spec, ranks))), expected);
    }
    EXPECT_EQ(without_shared_gradients(expect_ok(on_ranks(spec, {0, 200, 61, 0}))), expected);
  }
}

// Case 15: E_l of 1, 2 and 5 on EP 1, 2 and 4.
TEST(Determinism, Case15ExpertsPerRank) {
  for (const std::int32_t experts : {4, 8, 20}) {
    ProblemSpec spec = small_layer();
    spec.num_experts = experts;
    const Digests expected = expect_ok(spec);
    for (const int ranks : {2, 4}) {
      RunOptions options;
      options.repeat = 2;
      EXPECT_EQ(expect_ok(on_ranks(spec, ranks), options), expected);
    }
  }
}

// D4 and case 27: rank 0 keeps its tokens, rank 1's change in number and value.
TEST(Determinism, Case27ATokenDoesNotDependOnOthers) {
  ProblemSpec spec = on_ranks(small_layer(), {64, 200});
  spec.shared_intermediate = 64;
  LayerCase fixed(spec, {});
  fixed.step();
  const std::int64_t elements = 64 * spec.hidden;
  const auto rank0 = [&](const std::vector<float>& tensor) {
    return std::vector<float>(tensor.begin(), tensor.begin() + elements);
  };
  const std::vector<float> out = rank0(fixed.tensors().out);
  const std::vector<float> dx = rank0(fixed.tensors().dx);

  for (const std::int64_t others : {0, 1, 63, 150, 200}) {
    check::Problem varied = fixed.problem();
    varied.spec.tokens_per_rank = {64, others};
    const auto keep = [&](auto& tensor, std::int64_t width) {
      tensor.resize(static_cast<std::size_t>((64 + others) * width));
      for (std::size_t i = static_cast<std::size_t>(64 * width); i < tensor.size(); ++i) {
        if constexpr (std::is_same_v<std::decay_t<decltype(tensor[0])>, bf16>) {
          tensor[i] = to_bf16(-2.0f * to_float(tensor[i]) + 1.0f);
        } else {
          tensor[i] = tensor[i] >= 0 ? tensor[i] / 2 : tensor[i];
        }
      }
    };
    keep(varied.x, spec.hidden);
    keep(varied.dout, spec.hidden);
    keep(varied.topk_idx, spec.topk);
    keep(varied.topk_weights, spec.topk);
    fixed.step(varied);
    EXPECT_EQ(rank0(fixed.tensors().out), out) << others;
    EXPECT_EQ(rank0(fixed.tensors().dx), dx) << others;
  }
}

// A row's bits do not depend on its place in a tile: every token holds the same values and routes.
TEST(Determinism, ARowDoesNotDependOnItsPlace) {
  ProblemSpec spec = on_ranks(small_layer(), 2);
  spec.drop = 0.0;
  LayerCase layer(spec, {});
  check::Problem problem = layer.problem();
  const auto repeat = [&](auto& tensor, std::int64_t width) {
    for (std::size_t i = 0; i < tensor.size(); ++i) tensor[i] = tensor[i % static_cast<std::size_t>(width)];
  };
  repeat(problem.x, spec.hidden);
  repeat(problem.dout, spec.hidden);
  repeat(problem.topk_idx, spec.topk);
  repeat(problem.topk_weights, spec.topk);
  layer.step(problem);
  const auto expect_equal_rows = [&](const std::vector<float>& tensor, std::int64_t width) {
    for (std::size_t i = 0; i < tensor.size(); ++i) {
      ASSERT_EQ(tensor[i], tensor[i % static_cast<std::size_t>(width)]) << i;
    }
  };
  expect_equal_rows(layer.tensors().out, spec.hidden);
  expect_equal_rows(layer.tensors().dx, spec.hidden);
  expect_equal_rows(layer.tensors().dtopk_weights, spec.topk);
}

}  // namespace
}  // namespace clowder::test

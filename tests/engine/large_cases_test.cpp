// The cases of cases_test.cpp at their full size: minutes and gigabytes, so they are soaks.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "engine/layer_case.h"

namespace clowder::test {
namespace {

using check::Problem;
using check::ProblemSpec;

ProblemSpec layer_of(std::int64_t hidden, std::int64_t intermediate, std::int32_t experts, std::int32_t topk,
                     std::vector<std::int64_t> tokens_per_rank) {
  ProblemSpec spec;
  spec.hidden = hidden;
  spec.intermediate = intermediate;
  spec.num_experts = experts;
  spec.topk = topk;
  spec.tokens_per_rank = std::move(tokens_per_rank);
  return spec;
}

// Tokens [first, first + count) of a problem on one rank.
Problem tokens_of(const Problem& problem, std::int64_t first, std::int64_t count) {
  Problem part;
  part.spec = problem.spec;
  part.spec.tokens_per_rank = {count};
  part.shape = problem.shape;
  part.shape.max_tokens = count;
  const auto slice = [&](const auto& tensor, std::int64_t width) {
    const auto begin = tensor.begin() + first * width;
    return std::decay_t<decltype(tensor)>(begin, begin + count * width);
  };
  part.x = slice(problem.x, problem.shape.hidden);
  part.dout = slice(problem.dout, problem.shape.hidden);
  part.topk_idx = slice(problem.topk_idx, problem.shape.topk);
  part.topk_weights = slice(problem.topk_weights, problem.shape.topk);
  part.w13 = problem.w13;
  part.w2 = problem.w2;
  return part;
}

// The reference of a problem, some tokens at a time: tokens' results stand side by side, weights' gradients add up.
ReferenceResults reference_by_parts(const Problem& problem, std::int64_t tokens_at_once) {
  ReferenceResults whole;
  const auto append = [](std::vector<double>& to, const std::vector<double>& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  const auto add = [](std::vector<double>& to, const std::vector<double>& from) {
    to.resize(from.size(), 0.0);
    std::transform(to.begin(), to.end(), from.begin(), to.begin(), std::plus<>());
  };
  for (std::int64_t first = 0; first < problem.tokens(); first += tokens_at_once) {
    const std::int64_t count = std::min(tokens_at_once, problem.tokens() - first);
    const ReferenceResults part = check::compute_reference(tokens_of(problem, first, count), 2);
    append(whole.out, part.out);
    append(whole.dx, part.dx);
    append(whole.dtopk_weights, part.dtopk_weights);
    add(whole.dw13, part.dw13);
    add(whole.dw2, part.dw2);
  }
  return whole;
}

void expect_close_by_parts(const Problem& problem, const check::LayerTensors& tensors, std::int64_t tokens_at_once) {
  ReferenceResults reference = reference_by_parts(problem, tokens_at_once);
  for (const check::TensorReport& tensor : check::judge(problem, tensors, reference)) {
    EXPECT_TRUE(tensor.ok()) << tensor.name << ": rel " << tensor.errors.rel << " of " << tensor.bounds.rel;
  }
}

TEST(LongCase, ReferenceByPartsIsTheReference) {
  const ProblemSpec spec = layer_of(64, 32, 4, 2, {100});
  LayerCase layer(spec, {});
  layer.step();
  expect_close(layer.problem(), layer.tensors());
  expect_close_by_parts(layer.problem(), layer.tensors(), 33);
}

TEST(LongCase, Case1FullSizes) {
  const std::vector<std::int64_t> splits = {162, 0, 2577, 446, 0, 83};
  const std::int64_t tokens = std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
  LayerCase layer(layer_of(2048, 768, 6, 1, {tokens}), {});
  Problem problem = layer.problem();
  auto slot = problem.topk_idx.begin();
  for (std::size_t e = 0; e < splits.size(); ++e) slot = std::fill_n(slot, splits[e], static_cast<std::int32_t>(e));
  layer.step(problem);
  expect_close(problem, layer.tensors());
}

// More rows of one expert than 131072, of tokens of their own, and of a width of 8192.
TEST(LongCase, Case16MoreRowsOfOneExpertThan131072) {
  ProblemSpec spec = layer_of(256, 64, 1, 1, {131072 + 45});
  LayerCase narrow(spec, {});
  narrow.step();
  expect_close_by_parts(narrow.problem(), narrow.tensors(), 32768);

  spec = layer_of(8192, 32, 2, 16, {8195});
  spec.routing = check::parse_routing("one:1");
  WorkspaceOptions options;
  options.ring_rows = 4096;
  LayerCase wide(spec, options);
  wide.step();
  expect_close_by_parts(wide.problem(), wide.tensors(), 512);
}

TEST(LongCase, Case17EveryPowerOfTwoOnOneWorkspace) {
  constexpr std::int64_t kMost = 131072;
  const ProblemSpec spec = layer_of(32, 32, 4, 1, {kMost, 1});
  WorkspaceOptions options;
  options.ring_rows = 3000;
  LayerCase layer(spec, options);
  for (std::int64_t power = 1; power <= kMost; power *= 2) {
    for (const std::int64_t count : {power - 1, power, std::min(power + 1, kMost)}) {
      const Problem problem = check::make_problem(on_ranks(spec, {count, 1}), 2);
      layer.step(problem);
      expect_close(problem, layer.tensors());
    }
  }
}

// 2.2e9 elements of slots, all of them written and read. A token's results are those of the token alone.
TEST(LongCase, Case20EverySlotOfMoreElementsThan32BitsCount) {
  const ProblemSpec spec = layer_of(8192, 32, 2, 16, {17000});
  WorkspaceOptions options;
  options.ring_rows = 4096;
  options.saved_rows = 1000;
  LayerCase large(spec, options);
  large.step();
  for (const std::int64_t first : {0, 8000, 16980}) {
    const Problem part = tokens_of(large.problem(), first, 20);
    LayerCase small(part.spec, options);
    small.step(part);
    const auto same = [&](const std::vector<float>& whole, const std::vector<float>& of_part, std::int64_t width) {
      return std::equal(of_part.begin(), of_part.end(), whole.begin() + first * width);
    };
    EXPECT_TRUE(same(large.tensors().out, small.tensors().out, spec.hidden)) << first;
    EXPECT_TRUE(same(large.tensors().dx, small.tensors().dx, spec.hidden)) << first;
    EXPECT_TRUE(same(large.tensors().dtopk_weights, small.tensors().dtopk_weights, spec.topk)) << first;
  }
}

TEST(LongCase, Case26FullWidths) {
  for (const std::int64_t intermediate : {1536, 1408, 2880}) expect_ok(layer_of(2880, intermediate, 4, 2, {400}));
}

}  // namespace
}  // namespace clowder::test

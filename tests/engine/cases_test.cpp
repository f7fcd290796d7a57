// Faults that users of such systems have met, by the numbers of the team's list of cases.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <numeric>
#include <thread>

#include "engine/layer_case.h"
#include "model/all_activations.h"
#include "model/bf16.h"

namespace clowder::test {
namespace {

using check::ProblemSpec;
using check::RowCount;
using check::RunOptions;

ProblemSpec small_layer(std::vector<std::int64_t> tokens_per_rank) {
  ProblemSpec spec;
  spec.tokens_per_rank = std::move(tokens_per_rank);
  spec.hidden = 64;
  spec.intermediate = 32;
  spec.num_experts = 8;
  return spec;
}

RunOptions tuned(const char* ring, const char* saved) {
  RunOptions options;
  options.ring_rows = check::parse_ring_rows(ring);
  options.saved_rows = check::parse_saved_rows(saved);
  return options;
}

bool all_zero(const std::vector<float>& values, std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin; i < end; ++i) {
    if (values[static_cast<std::size_t>(i)] != 0.0f) return false;
  }
  return true;
}

// Routes the first slot of consecutive tokens to experts so that each gets as many rows as `splits` says.
check::Problem with_splits(check::Problem problem, const std::vector<std::int64_t>& splits) {
  std::fill(problem.topk_idx.begin(), problem.topk_idx.end(), -1);
  std::int64_t token = 0;
  for (std::size_t e = 0; e < splits.size(); ++e) {
    for (std::int64_t i = 0; i < splits[e]; ++i) {
      problem.topk_idx[static_cast<std::size_t>(token++ * problem.shape.topk)] = static_cast<std::int32_t>(e);
    }
  }
  return problem;
}

TEST(Case, Case1SplitsWithEmptyExperts) {
  const std::int64_t divisor = scaled(1, 8);
  ProblemSpec spec;
  spec.hidden = 2048 / 8;  // a quarter of the widths, and an eighth of H: the splits are what matters
  spec.intermediate = 768 / 4;
  spec.num_experts = 6;
  spec.topk = 1;
  std::vector<std::int64_t> splits = {162, 0, 2577, 446, 0, 83};
  for (std::int64_t& split : splits) split /= divisor;
  spec.tokens_per_rank = {std::accumulate(splits.begin(), splits.end(), std::int64_t{0})};
  for (const int ranks : {1, 3}) {
    LayerCase layer(on_ranks(spec, ranks), {});
    const check::Problem problem = with_splits(layer.problem(), splits);
    layer.step(problem);
    expect_close(problem, layer.tensors());
    const std::int64_t size = spec.intermediate * spec.hidden;
    for (const int empty : {1, 4}) {
      EXPECT_TRUE(all_zero(layer.tensors().dw13, 2 * empty * size, 2 * (empty + 1) * size));
      EXPECT_TRUE(all_zero(layer.tensors().dw2, empty * size, (empty + 1) * size));
    }
  }
}

TEST(Case, Case2ManyExpertsFewTokens) {
  ProblemSpec spec = small_layer({64});
  spec.num_experts = 256;
  expect_ok(spec);
  expect_ok(on_ranks(spec, 4));
  spec.drop = 1.0;  // then all experts are empty
  WorkspaceOptions poisoned;
  poisoned.poison = true;
  LayerCase layer(on_ranks(spec, 4), poisoned);
  layer.step();
  for (const auto* tensor : {&layer.tensors().dw13, &layer.tensors().dw2, &layer.tensors().out, &layer.tensors().dx}) {
    EXPECT_TRUE(all_zero(*tensor, 0, static_cast<std::int64_t>(tensor->size())));
  }
}

TEST(Case, Case3HalfOfTheSlotsWithoutRouteFiveSteps) {
  ProblemSpec spec = small_layer({50, 51});
  spec.drop = 0.5;
  WorkspaceOptions poisoned;
  poisoned.poison = true;
  LayerCase layer(spec, poisoned);
  for (int step = 0; step < 5; ++step) {
    spec.seed = static_cast<std::uint64_t>(step);
    const check::Problem problem = check::make_problem(spec, 1);
    layer.step(problem);
    expect_close(problem, layer.tensors());
  }
}

TEST(Case, Case4PoisonedRingsAndTables) {
  ProblemSpec spec = small_layer({70, 31});
  spec.shared_intermediate = 32;
  LayerCase clean(spec, {});
  WorkspaceOptions poisoned;
  poisoned.poison = true;
  LayerCase dirty(spec, poisoned);
  EXPECT_EQ(dirty.step(), clean.step());
}

void every_token_to_one_expert(int steps) {
  ProblemSpec spec = small_layer({40, 24, 0, 36});
  spec.hidden = 32;
  spec.routing = check::parse_routing("one:3");
  WorkspaceOptions options;
  options.ring_rows = Workspace::min_ring_rows();
  LayerCase layer(spec, options);
  const std::string expected = layer.step();
  expect_close(layer.problem(), layer.tensors());
  for (int step = 1; step < steps; ++step) ASSERT_EQ(layer.step(), expected) << step;
}

TEST(Case, Case5EveryTokenToOneExpert) { every_token_to_one_expert(scaled(300, 30)); }
TEST(LongCase, Case5EveryTokenToOneExpert2000Steps) { every_token_to_one_expert(2000); }

TEST(Case, Case6OneLocalExpertAndARingLargerThanUsed) {
  ProblemSpec spec = small_layer({20, 13});
  spec.num_experts = 2;
  for (const char* ring : {"1000", "full", "min"}) expect_ok(spec, tuned(ring, "all"));
}

TEST(Case, Case7RanksThatReceiveOrHoldNothing) {
  ProblemSpec spec = small_layer({0, 57, 0, 44});
  spec.routing = check::parse_routing("one:2");  // rank 1's
  spec.shared_intermediate = 32;
  expect_ok(spec);
  expect_ok(on_ranks(spec, {0, 0, 0, 101}));
  expect_ok(on_ranks(spec, {0, 0, 0, 0}));
}

// There is no bias yet: the gradients of weights are what must exclude padding.
TEST(Case, Case8PartialTiles) {
  for (const std::int64_t tokens : {1, 31, 33, 63, 65}) {
    ProblemSpec spec = small_layer({tokens});
    spec.num_experts = 1;
    spec.topk = 1;
    expect_ok(spec);
  }
}

TEST(Case, Case9IdsOutOfRange) {
  ProblemSpec spec = small_layer({33, 12});
  spec.bad_ids = 9;
  expect_ok(spec);  // compares the number of skipped ids, too
  LayerCase layer(spec, {});
  check::Problem problem = layer.problem();
  problem.topk_idx[0] = spec.num_experts;
  problem.topk_idx[1] = spec.num_experts + 7;
  problem.topk_idx[2] = -2;
  problem.topk_idx[3] = std::numeric_limits<std::int32_t>::min();
  problem.topk_idx[4] = std::numeric_limits<std::int32_t>::max();
  layer.step(problem);
  expect_close(problem, layer.tensors());
}

TEST(Case, Case10UnnormalisedWeightsOnTwoRanks) {
  ProblemSpec spec = small_layer({90});
  spec.topk_weights = check::parse_topk_weights("unnormalised");
  EXPECT_EQ(expect_ok(spec)["dtopk_weights"], expect_ok(on_ranks(spec, 2))["dtopk_weights"]);
}

TEST(Case, Case13AllWidthsDifferent) {
  ProblemSpec spec = small_layer({30, 34});
  spec.hidden = scaled(512, 256);
  spec.intermediate = scaled(384, 160);
  spec.shared_intermediate = scaled(640, 288);
  expect_ok(spec);
}

// A CPU's grid is its blocks: pairs of a math worker and a copy agent.
TEST(Case, Case14AnyNumberOfBlocks) {
  ProblemSpec spec = small_layer({90, 0, 41, 60});
  spec.shared_intermediate = 32;
  Digests expected;
  for (const std::int32_t blocks : {1, 2, 3, 78, 100}) {
    RunOptions options;
    options.workspace.blocks = blocks;
    const Digests digests = expect_ok(spec, options);
    if (blocks == 1) expected = digests;
    EXPECT_EQ(digests, expected) << blocks;
  }
}

TEST(Case, Case17AnyNumberOfTokensOnOneWorkspace) {
  std::vector<std::int64_t> counts = {1, 2, 31, 32, 33, 1000, 7, scaled<std::int64_t>(131072, 2048), 0, 5};
  ProblemSpec spec = small_layer({0, 0});
  spec.hidden = 32;
  spec.num_experts = 4;
  spec.topk = 1;
  WorkspaceOptions options;
  options.ring_rows = 3000;
  LayerCase layer(on_ranks(spec, {*std::max_element(counts.begin(), counts.end()), 1}), options);
  for (const std::int64_t count : counts) {
    const check::Problem problem = check::make_problem(on_ranks(spec, {count, 1}), 2);
    layer.step(problem);
    expect_close(problem, layer.tensors());
  }
}

TEST(Case, Case18OddNumbersOfTokens) {
  const std::int64_t divisor = scaled(1, 16);
  for (const std::int64_t tokens : {4095, 4097, 1}) {
    ProblemSpec spec = small_layer({std::max<std::int64_t>(tokens / divisor, 1), 1, 3, 0});
    expect_ok(spec);
  }
}

TEST(Case, Case19RowsAroundAPowerOfTwo) {
  for (const std::int64_t rows : {1023, 1024, 1025}) {
    ProblemSpec spec = small_layer({rows, 100});
    spec.topk = 1;
    LayerCase layer(spec, {});
    const check::Problem problem = with_splits(layer.problem(), {0, 0, 0, rows, 0, 10});
    layer.step(problem);
    expect_close(problem, layer.tensors());
  }
}

// Slots and ring together take 9 GB of addresses, of which only the pages of a few rows are touched.
TEST(Case, Case20MoreElementsThan32BitsCount) {
  ProblemSpec spec;
  spec.hidden = 8192;
  spec.intermediate = 32;
  spec.num_experts = 2;
  spec.topk = 16;
  spec.tokens_per_rank = {20};
  constexpr std::int64_t kMaxTokens = 17000;  // * K * H = 2.2e9 slots' elements
  WorkspaceOptions options;
  options.ring_rows = Workspace::min_ring_rows();
  options.saved_rows = 400;
  LayerCase small(spec, options);
  const std::string expected = small.step();
  expect_close(small.problem(), small.tensors());

  // The same tokens, at the end of a batch whose other tokens have no route.
  if (is_small_scale()) GTEST_SKIP() << "takes 1 GB";
  check::Problem problem = small.problem();
  problem.spec.tokens_per_rank = {kMaxTokens};
  const auto move_to_end = [&](auto& tensor, std::int64_t width, auto filler) {
    tensor.insert(tensor.begin(), static_cast<std::size_t>((kMaxTokens - 20) * width), filler);
  };
  move_to_end(problem.x, spec.hidden, bf16{0});
  move_to_end(problem.dout, spec.hidden, bf16{0});
  move_to_end(problem.topk_idx, spec.topk, -1);
  move_to_end(problem.topk_weights, spec.topk, 0.0f);
  LayerCase large(spec, options, kMaxTokens);
  large.step(problem);
  const auto tail = [](const std::vector<float>& tensor, std::size_t size) {
    return std::vector<float>(tensor.end() - static_cast<std::ptrdiff_t>(size), tensor.end());
  };
  EXPECT_EQ(tail(large.tensors().out, small.tensors().out.size()), small.tensors().out);
  EXPECT_EQ(tail(large.tensors().dx, small.tensors().dx.size()), small.tensors().dx);
}

TEST(Case, Case21RecomputeEqualsSaved) {
  ProblemSpec spec = small_layer({60, 71});
  spec.shared_intermediate = 64;
  const Digests expected = expect_ok(spec, tuned("full", "all"));
  EXPECT_EQ(expect_ok(spec, tuned("full", "0")), expected);
  EXPECT_EQ(expect_ok(spec, tuned("min", "1/3")), expected);
}

TEST(Case, Case22IdenticalTokens) {
  ProblemSpec spec = small_layer({40, 30});
  LayerCase layer(spec, {});
  check::Problem problem = layer.problem();
  for (std::size_t i = 0; i < problem.topk_idx.size(); ++i) problem.topk_idx[i] = static_cast<std::int32_t>(i % 2);
  layer.step(problem);
  expect_close(problem, layer.tensors());
}

TEST(Case, Case23UnequalTokenCounts) {
  const ProblemSpec spec = small_layer({17, 16, 7, 1});
  EXPECT_EQ(expect_ok(spec), expect_ok(on_ranks(spec, 1)));
}

// Two layers share a workspace, each called from a thread of its own: calls take turns, step by step or in between.
TEST(Case, Case25TwoLayersOnOneWorkspaceFromTwoThreads) {
  ProblemSpec spec = small_layer({30, 17});
  LayerCase layer(spec, {});
  std::vector<check::Problem> problems;
  std::vector<std::string> expected;
  for (const std::uint64_t seed : {4u, 5u}) {
    spec.seed = seed;
    problems.push_back(check::make_problem(spec, 1));
    expected.push_back(layer.step(problems.back()));
  }
  const auto run = [&](std::size_t which) {
    for (int round = 0; round < 20; ++round) {
      check::EngineStep step(problems[which], layer.workspace(), false);
      step.reset();
      step.run(layer.workspace());
      EXPECT_EQ(step.digest_of_everything(), expected[which]) << which << " in round " << round;
    }
  };
  const std::jthread other([&] { run(1); });
  run(0);
}

TEST(Case, Case26WidthsThatAreNoPowersOfTwo) {
  for (const auto& [hidden, intermediate] : {std::pair{320, 1408}, std::pair{2880, 96}}) {
    ProblemSpec spec = small_layer({35});
    spec.hidden = hidden;
    spec.intermediate = intermediate;
    spec.num_experts = 2;
    expect_ok(spec);
  }
}

TEST(Case, Case28ManyExpertsAndEveryK) {
  ProblemSpec spec = small_layer({100, 103});
  for (const std::int32_t topk : {1, 2, 3, 6, 10, 16}) {
    spec.topk = topk;
    spec.num_experts = 16;
    expect_ok(spec);
    spec.num_experts = 512;
    expect_ok(spec);
  }
  spec.num_experts = 2;  // a token has to choose an expert several times
  spec.topk = 7;
  expect_ok(spec);
}

bool all_finite(const check::LayerTensors& tensors) {
  const auto finite = [](const std::vector<float>& tensor) {
    return std::all_of(tensor.begin(), tensor.end(), [](float value) { return std::isfinite(value); });
  };
  return finite(tensors.out) && finite(tensors.dx) && finite(tensors.dtopk_weights) && finite(tensors.dw13) &&
         finite(tensors.dw2);
}

// Values of 2^58 pass through products of two of them (h, and the gradients of w13), which bf16 can hold.
TEST(Case, Case29ZerosDenormalsAndHugeValues) {
  ProblemSpec spec = small_layer({40, 23});
  LayerCase layer(spec, {});
  check::Problem zeros = layer.problem();
  std::fill_n(zeros.x.begin() + 5 * spec.hidden, 3 * spec.hidden, bf16{0});
  const std::int64_t size = spec.intermediate * spec.hidden;
  std::fill_n(zeros.w13.begin() + 2 * size, 2 * size, bf16{0});
  std::fill_n(zeros.w2.begin() + size, size, bf16{0});
  layer.step(zeros);
  EXPECT_TRUE(all_finite(layer.tensors()));
  EXPECT_TRUE(all_zero(layer.tensors().out, 5 * spec.hidden, 8 * spec.hidden)) << "rows of zeros";
  EXPECT_TRUE(all_zero(layer.tensors().dw13, 2 * size, 4 * size)) << "a zero expert hides its inputs";
  EXPECT_TRUE(all_zero(layer.tensors().dw2, size, 2 * size)) << "and has h = 0";

  check::Problem extreme = layer.problem();
  for (const int exponent : {-133, -126, 58}) {
    for (std::size_t i = 0; i < extreme.x.size(); ++i) {
      extreme.x[i] = to_bf16(std::ldexp(i % 3 == 0 ? -1.0f : 1.0f, exponent));
    }
    layer.step(extreme);
    EXPECT_TRUE(all_finite(layer.tensors())) << exponent;
  }
}

TEST(Case, Case30ZeroAndNegativeWeights) {
  for (const char* weights : {"zeros", "signed"}) {
    ProblemSpec spec = small_layer({80, 33});
    spec.topk_weights = check::parse_topk_weights(weights);
    expect_ok(spec);
    spec.shared_intermediate = 32;
    expect_ok(spec);
  }
}

TEST(Case, Case31AHotExpertInASmallRing) {
  ProblemSpec spec = small_layer({700, 0, 150, 401});
  spec.routing = check::parse_routing("hot:0.9");
  const Digests expected = expect_ok(spec, tuned("full", "all"));
  EXPECT_EQ(expect_ok(spec, tuned("1/8", "all")), expected);
  EXPECT_EQ(expect_ok(spec, tuned("1/8", "1/3")), expected);
}

// Every element of a token's x and dy tells which token it is, and tokens stand elsewhere in each round: a row that is
// stale, torn or misplaced gives other bits than its token's.
void integer_coded_rows(int rounds) {
  constexpr std::int64_t kTokens = 61;
  ProblemSpec spec = small_layer({20, 0, 30, 11});
  spec.hidden = 32;
  spec.num_experts = 4;
  WorkspaceOptions options;
  options.ring_rows = Workspace::min_ring_rows();
  options.saved_rows = 10;
  options.blocks = 3;
  options.jitter_seed = 1;
  LayerCase layer(spec, options);
  check::Problem problem = layer.problem();
  const std::vector<std::int32_t> routes = problem.topk_idx;
  const std::vector<float> weights = problem.topk_weights;
  std::vector<float> out, dx;
  for (int round = 0; round < rounds; ++round) {
    const auto token_at = [&](std::int64_t place) { return (place * 7 + round) % kTokens; };
    for (std::int64_t place = 0; place < kTokens; ++place) {
      const std::int64_t token = token_at(place);
      std::fill_n(problem.x.begin() + place * 32, 32, to_bf16(static_cast<float>(token + 1) / 16));
      std::fill_n(problem.dout.begin() + place * 32, 32, to_bf16(static_cast<float>(token + 1) / 32));
      std::copy_n(routes.begin() + token * 2, 2, problem.topk_idx.begin() + place * 2);
      std::copy_n(weights.begin() + token * 2, 2, problem.topk_weights.begin() + place * 2);
    }
    layer.step(problem);
    const auto by_token = [&](const std::vector<float>& tensor) {
      std::vector<float> sorted(tensor.size());
      for (std::int64_t place = 0; place < kTokens; ++place) {
        std::copy_n(tensor.begin() + place * 32, 32, sorted.begin() + token_at(place) * 32);
      }
      return sorted;
    };
    if (round == 0) {
      out = by_token(layer.tensors().out);
      dx = by_token(layer.tensors().dx);
      expect_close(problem, layer.tensors());
    }
    ASSERT_EQ(by_token(layer.tensors().out), out) << round;
    ASSERT_EQ(by_token(layer.tensors().dx), dx) << round;
  }
}

TEST(Case, Case32IntegerCodedRows) { integer_coded_rows(scaled(500, 50)); }
TEST(LongCase, Case32IntegerCodedRows10000Rounds) { integer_coded_rows(10000); }

// Case 33 in the order of a pipeline: both forwards, then both backwards, in either order, on one workspace.
TEST(Case, Case33ForwardsRunAheadOfBackwards) {
  ProblemSpec spec = small_layer({40, 23});
  spec.shared_intermediate = 32;
  std::vector<check::Problem> problems;
  for (const std::uint64_t seed : {1, 2}) {
    spec.seed = seed;
    problems.push_back(check::make_problem(spec, 1));
  }
  LayerCase layer(spec, {});
  std::vector<std::string> expected;
  for (const check::Problem& problem : problems) expected.push_back(layer.step(problem));

  for (const auto& order : {std::vector<std::size_t>{0, 1}, std::vector<std::size_t>{1, 0}}) {
    std::deque<check::EngineStep> steps;  // which do not move
    for (const check::Problem& problem : problems) {
      steps.emplace_back(problem, layer.workspace(), false);
      steps.back().reset();
      layer.workspace().build_schedule({steps.back().ids(0), steps.back().ids(1)},
                                       {steps.back().schedule(0), steps.back().schedule(1)});
      layer.workspace().forward({steps.back().forward_inputs(0), steps.back().forward_inputs(1)});
    }
    for (const std::size_t i : order) {
      layer.workspace().backward({steps[i].backward_inputs(0), steps[i].backward_inputs(1)}, GradientMode::kWriteBf16);
    }
    for (std::size_t i = 0; i < 2; ++i) EXPECT_EQ(steps[i].digest_of_everything(), expected[i]);
  }
}

// Experts, ranks and chunks without rows between those that have some, wherever rings and chunks end.
TEST(Case, Case36NothingInTheMiddle) {
  ProblemSpec spec = small_layer({400});
  spec.topk = 1;
  const std::vector<std::vector<std::int64_t>> all_splits = {
      {40, 0, 0, 70, 0, 1, 0, 200}, {0, 0, 0, 0, 0, 0, 0, 33}, {97, 0, 0, 0, 0, 0, 0, 97}, {0, 1, 0, 1, 0, 1, 0, 0}};
  for (const std::vector<std::int64_t>& splits : all_splits) {
    for (const int ranks : {1, 2, 4, 8}) {
      for (const std::int64_t ring : {Workspace::min_ring_rows(), std::int64_t{1000}}) {
        WorkspaceOptions options;
        options.ring_rows = ring;
        options.saved_rows = 50;
        options.timeout_s = 20.0;
        LayerCase layer(on_ranks(spec, ranks), options);
        const check::Problem problem = with_splits(layer.problem(), splits);
        layer.step(problem);
        expect_close(problem, layer.tensors());
      }
    }
  }
}

// Passes follow each other on the same buffers as fast as they can, with late copies, and other rows each time.
TEST(Case, Case37BuffersOfOnePassServeTheNext) {
  ProblemSpec spec = small_layer({45, 0, 61, 30});
  spec.shared_intermediate = 32;
  WorkspaceOptions options;
  options.ring_rows = Workspace::min_ring_rows();
  options.saved_rows = 40;
  options.blocks = 3;
  std::vector<check::Problem> problems;
  std::vector<std::string> expected;
  for (const std::uint64_t seed : {1u, 2u, 3u}) {
    spec.seed = seed;
    LayerCase alone(spec, options);
    expected.push_back(alone.step());
    problems.push_back(alone.problem());
  }
  options.jitter_seed = 9;
  LayerCase layer(spec, options);
  const int rounds = scaled(60, 12);
  for (int round = 0; round < rounds; ++round) {
    const std::size_t which = static_cast<std::size_t>(round * round + round / 3) % problems.size();
    ASSERT_EQ(layer.step(problems[which]), expected[which]) << round;
  }
}

TEST(Case, ManyRanks) {
  ProblemSpec spec = small_layer({300});
  spec.num_experts = 72;
  spec.topk = 4;
  const Digests expected = expect_ok(spec);
  for (const int ranks : {36, 72}) EXPECT_EQ(expect_ok(on_ranks(spec, ranks)), expected);
}

TEST(Case, NanStaysWithItsToken) {
  ProblemSpec spec = small_layer({30, 30});
  LayerCase layer(spec, {});
  layer.step();
  const check::LayerTensors clean = layer.tensors();
  check::Problem problem = layer.problem();
  constexpr std::int64_t kToken = 37;
  std::fill_n(problem.x.begin() + kToken * spec.hidden, spec.hidden, bf16{0x7fc0});
  layer.step(problem);
  for (std::int64_t i = 0; i < 60 * spec.hidden; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (i / spec.hidden == kToken) {
      EXPECT_TRUE(std::isnan(layer.tensors().out[at]));
    } else {
      ASSERT_EQ(layer.tensors().out[at], clean.out[at]);
      ASSERT_EQ(layer.tensors().dx[at], clean.dx[at]);
    }
  }
}

// Random layers of every shape, on any tuning.
TEST(Case, RandomLayers) {
  std::uint64_t state = 12345;
  const auto below = [&](std::uint64_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % n;
  };
  for (int round = 0; round < scaled(60, 8); ++round) {
    const int ranks = static_cast<int>(1 + below(5));
    ProblemSpec spec;
    spec.tokens_per_rank.clear();
    for (int r = 0; r < ranks; ++r) spec.tokens_per_rank.push_back(static_cast<std::int64_t>(below(3) * below(60)));
    spec.hidden = static_cast<std::int64_t>(32 * (1 + below(10)));
    spec.intermediate = static_cast<std::int64_t>(32 * (1 + below(7)));
    spec.shared_intermediate = static_cast<std::int64_t>(32 * below(4));
    spec.num_experts = static_cast<std::int32_t>(static_cast<std::uint64_t>(ranks) * (1 + below(4)));
    spec.topk = static_cast<std::int32_t>(1 + below(5));
    spec.drop = static_cast<double>(below(3)) / 4;
    spec.gradient_mode = static_cast<GradientMode>(below(4));
    spec.seed = static_cast<std::uint64_t>(round);
    spec.activation = all_activations()[below(all_activations().size())];
    RunOptions options = tuned(below(2) == 0 ? "min" : "1/2", below(2) == 0 ? "1/3" : "all");
    options.workspace.blocks = static_cast<std::int32_t>(1 + below(4));
    options.workspace.keep_x = below(2) == 0;
    options.jitter = below(4) == 0;
    SCOPED_TRACE("round " + std::to_string(round));
    expect_ok(spec, options);
  }
}

}  // namespace
}  // namespace clowder::test

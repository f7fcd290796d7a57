#include "check/problem.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <set>

#include "model/bf16.h"

namespace clowder::check {
namespace {

ProblemSpec small_spec() {
  ProblemSpec spec;
  spec.tokens_per_rank = {64};
  spec.hidden = 64;
  spec.intermediate = 32;
  return spec;
}

bool same_bits(const std::vector<bf16>& a, const std::vector<bf16>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](bf16 x, bf16 y) { return x.bits == y.bits; });
}

bool same_data(const Problem& a, const Problem& b) {
  return same_bits(a.x, b.x) && same_bits(a.dout, b.dout) && a.topk_idx == b.topk_idx &&
         a.topk_weights == b.topk_weights && same_bits(a.w13, b.w13) && same_bits(a.w2, b.w2) &&
         same_bits(a.shared_w13, b.shared_w13) && same_bits(a.shared_w2, b.shared_w2) && a.main_w13 == b.main_w13;
}

void expect_refused(const ProblemSpec& spec, const std::string& argument) {
  try {
    make_problem(spec, 1);
    ADD_FAILURE() << argument << " was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kArgument);
    EXPECT_EQ(std::string(error.what()).find(argument + ": "), 0u) << error.what();
  }
}

double mean_square(const std::vector<bf16>& values) {
  double sum = 0.0;
  for (const bf16 value : values) sum += std::pow(static_cast<double>(to_float(value)), 2);
  return sum / static_cast<double>(values.size());
}

TEST(Problem, DependsOnTheSeedAndTheGlobalShapeOnly) {
  for (const char* routing : {"uniform", "zipf:1.2", "hot:0.8", "one:3"}) {
    ProblemSpec spec = small_spec();
    spec.routing = parse_routing(routing);
    spec.shared_intermediate = 32;
    spec.drop = 0.2;
    spec.bad_ids = 3;
    spec.gradient_mode = GradientMode::kAccumulateFp32;
    const Problem first = make_problem(spec, 1);
    ASSERT_TRUE(same_data(first, make_problem(spec, 3))) << "threads";
    spec.tokens_per_rank = {10, 0, 53, 1};
    ASSERT_TRUE(same_data(first, make_problem(spec, 2))) << "ranks";
    spec.seed = 1;
    const Problem other = make_problem(spec, 2);
    EXPECT_FALSE(same_bits(first.x, other.x));
    EXPECT_NE(first.topk_weights, other.topk_weights);
  }
}

TEST(Problem, ValuesHaveTheirScale) {
  ProblemSpec spec = small_spec();
  spec.tokens_per_rank = {1024};
  spec.scale = 4.0;
  spec.shared_intermediate = 96;
  const Problem problem = make_problem(spec, 2);
  EXPECT_NEAR(mean_square(problem.x), 16.0, 0.4);
  EXPECT_NEAR(mean_square(problem.dout), 1.0, 0.025);
  EXPECT_NEAR(mean_square(problem.w13) * 64, 1.0, 0.04);
  EXPECT_NEAR(mean_square(problem.w2) * 32, 1.0, 0.06);
  EXPECT_NEAR(mean_square(problem.shared_w2) * 96, 1.0, 0.08);
  double sum = 0.0, fourth = 0.0;
  for (const bf16 value : problem.dout) {
    sum += static_cast<double>(to_float(value));
    fourth += std::pow(static_cast<double>(to_float(value)), 4);
  }
  EXPECT_NEAR(sum / static_cast<double>(problem.dout.size()), 0.0, 0.02);
  EXPECT_NEAR(fourth / static_cast<double>(problem.dout.size()), 3.0, 0.15);
}

TEST(Problem, RoutingIsWhatWasAskedFor) {
  ProblemSpec spec = small_spec();
  spec.tokens_per_rank = {2000};
  spec.topk = 3;
  const auto rows_of = [&](const char* routing, int expert) {
    spec.routing = parse_routing(routing);
    const Problem problem = make_problem(spec, 1);
    return std::count(problem.topk_idx.begin(), problem.topk_idx.end(), expert);
  };
  for (int e = 0; e < 8; ++e) EXPECT_NEAR(static_cast<double>(rows_of("uniform", e)), 750.0, 120.0);
  EXPECT_EQ(rows_of("hot:0.9", 0), 5400);
  EXPECT_EQ(rows_of("hot:0", 0), 0);
  EXPECT_EQ(rows_of("one:5", 5), 6000);
  EXPECT_GT(rows_of("zipf:1.5", 0), rows_of("zipf:1.5", 1));
  EXPECT_GT(rows_of("zipf:1.5", 1), rows_of("zipf:1.5", 4));
}

TEST(Problem, ATokensExpertsDifferWhereTheyCan) {
  for (const char* routing : {"uniform", "zipf:2"}) {
    ProblemSpec spec = small_spec();
    spec.routing = parse_routing(routing);
    for (const std::int32_t topk : {2, 8, 12}) {
      spec.topk = topk;
      const Problem problem = make_problem(spec, 1);
      for (int t = 0; t < 64; ++t) {
        const std::set<std::int32_t> ids(problem.topk_idx.begin() + t * topk,
                                         problem.topk_idx.begin() + (t + 1) * topk);
        ASSERT_TRUE(topk > 8 || static_cast<std::int32_t>(ids.size()) == topk);
        ASSERT_GE(*ids.begin(), 0);
        ASSERT_LT(*ids.rbegin(), 8);
      }
    }
  }
}

TEST(Problem, DroppedAndBadIdsAreCounted) {
  ProblemSpec spec = small_spec();
  spec.drop = 0.25;
  spec.bad_ids = 7;
  const Problem problem = make_problem(spec, 1);
  int bad = 0;
  std::set<std::int32_t> kinds;
  for (const std::int32_t id : problem.topk_idx) {
    if (id == -1 || (id >= 0 && id < 8)) continue;
    ++bad;
    kinds.insert(id);
  }
  EXPECT_EQ(bad, 7);
  for (const std::int32_t id : {8, 15, -2}) EXPECT_EQ(kinds.count(id), 1u) << id;
  spec.bad_ids = 0;
  const Problem dropped = make_problem(spec, 1);
  EXPECT_EQ(std::count(dropped.topk_idx.begin(), dropped.topk_idx.end(), -1), 32);
  spec.drop = 1.0;
  const Problem empty = make_problem(spec, 1);
  EXPECT_EQ(std::count(empty.topk_idx.begin(), empty.topk_idx.end(), -1), 128);
}

TEST(Problem, TopkWeightsAreOfTheirKind) {
  ProblemSpec spec = small_spec();
  const auto weights = [&](const char* kind) {
    spec.topk_weights = parse_topk_weights(kind);
    return make_problem(spec, 1).topk_weights;
  };
  const std::vector<float> uniform = weights("uniform");
  for (int t = 0; t < 64; ++t) EXPECT_NEAR(static_cast<double>(uniform[2 * t] + uniform[2 * t + 1]), 1.0, 1e-6);
  for (const float weight : weights("zeros")) EXPECT_EQ(weight, 0.0f);
  const std::vector<float> is_signed = weights("signed");
  EXPECT_LT(*std::min_element(is_signed.begin(), is_signed.end()), -0.5f);
  EXPECT_GT(*std::max_element(is_signed.begin(), is_signed.end()), 0.5f);
  const std::vector<float> unnormalised = weights("unnormalised");
  EXPECT_GT(*std::min_element(unnormalised.begin(), unnormalised.end()), 0.0f);
  EXPECT_GT(*std::max_element(unnormalised.begin(), unnormalised.end()), 2.0f);
}

TEST(Problem, MainGradientsAreThereWhereTheyAreAddedTo) {
  ProblemSpec spec = small_spec();
  EXPECT_TRUE(make_problem(spec, 1).main_w13.empty());
  spec.gradient_mode = GradientMode::kAccumulateBf16;
  const Problem problem = make_problem(spec, 1);
  EXPECT_EQ(problem.main_w13.size(), problem.w13.size());
  EXPECT_EQ(problem.main_w2.size(), problem.w2.size());
  for (const float value : problem.main_w2) ASSERT_EQ(to_float(to_bf16(value)), value);
  spec.gradient_mode = GradientMode::kAccumulateFp32;
  const Problem fp32 = make_problem(spec, 1);
  EXPECT_FALSE(std::all_of(fp32.main_w2.begin(), fp32.main_w2.end(),
                           [](float value) { return to_float(to_bf16(value)) == value; }));
}

TEST(Problem, RoutesCanComeFromAFile) {
  const std::string path = testing::TempDir() + "clowder_routes.txt";
  ProblemSpec spec = small_spec();
  spec.tokens_per_rank = {3};
  spec.routing = parse_routing("file:" + path);
  std::ofstream(path) << "0 1\n-1 7\n\n9 3\n";
  EXPECT_EQ(make_problem(spec, 1).topk_idx, (std::vector<std::int32_t>{0, 1, -1, 7, 9, 3}));
  for (const char* text : {"0 1\n2\n3 4\n", "0 1\n2 3\n", "0 1\n2 x\n3 4\n", "0 1\n2 3 4\n5 6\n", ""}) {
    std::ofstream(path) << text;
    expect_refused(spec, "routing");
  }
  std::remove(path.c_str());
  expect_refused(spec, "routing");
}

TEST(Problem, BadSpecsNameTheirArgument) {
  const auto refuse = [](const std::string& argument, auto change) {
    ProblemSpec spec = small_spec();
    change(spec);
    expect_refused(spec, argument);
  };
  refuse("tokens", [](ProblemSpec& s) { s.tokens_per_rank = {4, -1}; });
  refuse("hidden", [](ProblemSpec& s) { s.hidden = 40; });
  refuse("intermediate", [](ProblemSpec& s) { s.intermediate = 0; });
  refuse("num_experts", [](ProblemSpec& s) { s.tokens_per_rank = {1, 1, 1}; });
  refuse("topk", [](ProblemSpec& s) { s.topk = 17; });
  refuse("drop", [](ProblemSpec& s) { s.drop = 1.5; });
  refuse("drop", [](ProblemSpec& s) { s.drop = NAN; });
  refuse("bad-ids", [](ProblemSpec& s) { s.bad_ids = 129; });
  refuse("scale", [](ProblemSpec& s) { s.scale = 0.0; });
  refuse("routing", [](ProblemSpec& s) { s.routing = parse_routing("one:8"); });
  refuse("routing", [](ProblemSpec& s) { s.routing = parse_routing("hot:1.1"); });
}

TEST(Problem, WordsThatAreNoOptionAreRefused) {
  for (const char* text : {"", "zipf", "zipf:", "zipf:x", "hot", "one:", "one:1.5", "file:", "uniform:1", "random"}) {
    EXPECT_THROW(parse_routing(text), Error) << text;
  }
  EXPECT_THROW(parse_topk_weights("normalised"), Error);
  EXPECT_THROW(parse_gradient_mode("fp16"), Error);
}

TEST(Problem, TokensAreSplitAsEvenlyAsCanBe) {
  EXPECT_EQ(split_tokens(10, 4), (std::vector<std::int64_t>{3, 3, 2, 2}));
  EXPECT_EQ(split_tokens(0, 2), (std::vector<std::int64_t>{0, 0}));
  EXPECT_THROW(split_tokens(-1, 2), Error);
  EXPECT_THROW(split_tokens(1, 0), Error);
}

}  // namespace
}  // namespace clowder::check

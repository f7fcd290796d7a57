// Cases, timing and rows of benches.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "bench/cases.h"
#include "bench/layer.h"
#include "bench/measure.h"
#include "bench/row.h"
#include "model/shape.h"

namespace clowder::bench {
namespace {

TEST(BenchCases, AreLayersWithNamesOfTheirOwn) {
  std::set<std::string> names;
  for (const Case& layer : all_cases()) {
    names.insert(layer.name);
    EXPECT_EQ(&find_case(layer.name), &layer);
    const check::ProblemSpec spec = make_spec(layer, 1.0);
    EXPECT_EQ(spec.tokens(), layer.tokens * layer.ranks);
    LayerShape shape;
    shape.hidden = spec.hidden;
    shape.intermediate = spec.intermediate;
    shape.shared_intermediate = spec.shared_intermediate;
    shape.num_experts = spec.num_experts;
    shape.topk = spec.topk;
    shape.max_tokens = layer.tokens;
    EXPECT_NO_THROW(validate(shape, layer.ranks)) << layer.name;
  }
  EXPECT_EQ(names.size(), all_cases().size());
  try {
    find_case("dsv3");
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kArgument);
    EXPECT_NE(std::string(error.what()).find("\"dsv3\", must be one of dsv3-ep8"), std::string::npos) << error.what();
  }
}

TEST(BenchCases, ScaleTheirTokens) {
  const Case& layer = find_case("qwen3-30b-ep8");
  EXPECT_EQ(make_spec(layer, 1.0 / 64).tokens_per_rank, std::vector<std::int64_t>(8, 128));
  EXPECT_EQ(make_spec(layer, 1e-9).tokens_per_rank, std::vector<std::int64_t>(8, 1));
  for (const double scale : {0.0, -1.0, 1.5}) EXPECT_THROW(make_spec(layer, scale), Error);
}

TEST(Median, IsTheMiddle) {
  EXPECT_EQ(median({3.0}), 3.0);
  EXPECT_EQ(median({9.0, 1.0, 5.0}), 5.0);
  EXPECT_EQ(median({4.0, 1.0, 2.0, 100.0}), 3.0);
}

// Steps of 40, 1, 1, ... ms: the first is left out, a block takes as many as fill 10 ms, and an outlier moves the
// spread but not the median.
TEST(Measure, RepeatsStepsUntilABlockIsLongEnough) {
  int calls = 0;
  const auto step = [&] {
    ++calls;
    if (calls == 1) return 40.0;
    return calls == 2 ? 11.0 : 1.0;
  };
  const Timing timing = measure({5, 10.0}, step);
  EXPECT_EQ(timing.steps, 1 + 4 * 10);
  EXPECT_EQ(calls, 1 + timing.steps);
  EXPECT_EQ(timing.median, 1.0);
  EXPECT_EQ(timing.lowest, 1.0);
  EXPECT_EQ(timing.highest, 11.0);
  EXPECT_THROW(measure({0, 10.0}, step), Error);
}

TEST(TimedPasses, AreReadOrRefused) {
  for (const TimedPass pass :
       {TimedPass::kSchedule, TimedPass::kForward, TimedPass::kBackward, TimedPass::kForwardBackward}) {
    EXPECT_EQ(parse_timed_pass(to_string(pass)), pass);
  }
  for (const char* text : {"", "forwards", "backward+forward"}) EXPECT_THROW(parse_timed_pass(text), Error);
}

check::ProblemSpec small_spec() {
  check::ProblemSpec spec;
  spec.tokens_per_rank = {40, 24};
  spec.hidden = 64;
  spec.intermediate = 32;
  spec.shared_intermediate = 96;
  return spec;
}

TEST(BenchRow, HoldsWhatWasMeasuredAndNothingElse) {
  const auto layer = make_layer(small_spec(), {});
  Row row;
  row.engine = "cpu";
  row.spec = small_spec();
  row.pass = TimedPass::kForward;
  measure_row(*layer, {2, 0.0}, row);
  const auto json = nlohmann::json::parse(to_json(row));
  EXPECT_EQ(json["pass"], "forward");
  EXPECT_EQ(json["ranks"], 2);
  EXPECT_EQ(json["T"], 40);
  EXPECT_EQ(json["tokens_per_rank"], (std::vector<int>{40, 24}));
  EXPECT_EQ(json["shared"], true);
  EXPECT_EQ(json["Is"], 96);
  EXPECT_EQ(json["blocks"], 2);
  EXPECT_GT(json["clowder_ms"].get<double>(), 0.0);
  EXPECT_LE(json["clowder_ms_spread"][0], json["clowder_ms"]);
  EXPECT_GE(json["clowder_ms_spread"][1], json["clowder_ms"]);
  for (const char* absent : {"case", "dense_ms", "torch_ms", "peak_extra_gib", "emulated_peers", "scale_tokens"}) {
    EXPECT_FALSE(json.contains(absent)) << absent;
  }
  row.pass = TimedPass::kSchedule;
  row.saved_gib.reset();
  measure_row(*layer, {1, 0.0}, row);
  EXPECT_FALSE(nlohmann::json::parse(to_json(row)).contains("clowder_tflops"));
  EXPECT_FALSE(nlohmann::json::parse(to_json(row)).contains("saved_gib"));
}

// 6 T (K I + Is) H forward, three times that with backward.
TEST(BenchRow, CountsTheLayersProducts) {
  Row row;
  row.spec = small_spec();
  row.pass = TimedPass::kForward;
  const double forward = 6.0 * 64 * (2 * 32 + 96) * 64;
  EXPECT_EQ(row.flops(), forward);
  row.pass = TimedPass::kBackward;
  EXPECT_EQ(row.flops(), 2 * forward);
  row.pass = TimedPass::kForwardBackward;
  EXPECT_EQ(row.flops(), 3 * forward);
}

}  // namespace
}  // namespace clowder::bench

#include "check/run.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>

namespace clowder::check {
namespace {

ProblemSpec small_spec(std::vector<std::int64_t> tokens_per_rank) {
  ProblemSpec spec;
  spec.tokens_per_rank = std::move(tokens_per_rank);
  spec.hidden = 96;
  spec.intermediate = 64;
  spec.shared_intermediate = 32;
  return spec;
}

RunOptions quick_options() {
  RunOptions options;
  options.workspace.timeout_s = 20.0;
  options.workspace.blocks = 2;
  return options;
}

std::map<std::string, std::string> digests(const Report& report) {
  std::map<std::string, std::string> result;
  for (const TensorReport& tensor : report.tensors) result[tensor.name] = tensor.digest;
  return result;
}

// Everything that tuning and delays may not change.
TEST(RunCheck, GivesTheSameBitsWhateverTheTuning) {
  const ProblemSpec spec = small_spec({70, 0, 35, 24});
  RunOptions options = quick_options();
  const Report plain = run_check(spec, options);
  ASSERT_TRUE(plain.ok()) << to_text(plain);
  options.ring_rows = parse_ring_rows("min");
  options.saved_rows = parse_saved_rows("1/3");
  options.workspace.blocks = 3;
  options.workspace.poison = true;
  options.jitter = true;
  options.repeat = 3;
  const Report tuned = run_check(spec, options);
  EXPECT_TRUE(tuned.ok()) << to_text(tuned);
  EXPECT_EQ(digests(plain), digests(tuned));
  options.ring_rows = parse_ring_rows("full");
  options.saved_rows = parse_saved_rows("all");
  options.workspace.keep_x = true;
  EXPECT_EQ(digests(plain), digests(run_check(spec, options)));
}

TEST(RunCheck, GivesTheSameBitsWhateverTheRanks) {
  std::map<std::string, std::string> first;
  for (const int ranks : {1, 2, 8}) {
    const Report report = run_check(small_spec(split_tokens(133, ranks)), quick_options());
    EXPECT_TRUE(report.ok()) << to_text(report);
    std::map<std::string, std::string> of_ranks = digests(report);
    of_ranks.erase("dshared_w13");
    of_ranks.erase("dshared_w2");
    if (ranks == 1) first = of_ranks;
    EXPECT_EQ(of_ranks, first) << ranks;
  }
}

TEST(RunCheck, EveryGradientModeIsRight) {
  for (const char* mode : {"bf16", "fp32", "accumulate-fp32", "accumulate-bf16"}) {
    ProblemSpec spec = small_spec({64, 33});
    spec.gradient_mode = parse_gradient_mode(mode);
    spec.drop = 0.3;
    const Report report = run_check(spec, quick_options());
    EXPECT_TRUE(report.ok()) << mode << "\n" << to_text(report);
  }
}

TEST(RunCheck, CountsIdsOutOfRange) {
  ProblemSpec spec = small_spec({64});
  spec.bad_ids = 11;
  const Report report = run_check(spec, quick_options());
  EXPECT_EQ(report.skipped_ids, 11);
  EXPECT_TRUE(report.ok()) << to_text(report);
}

TEST(RunCheck, ForwardAloneHasOneTensor) {
  ProblemSpec spec = small_spec({64});
  spec.forward_only = true;
  const Report report = run_check(spec, quick_options());
  EXPECT_EQ(report.tensors.size(), 1u);
  EXPECT_TRUE(report.ok()) << to_text(report);
}

TEST(RunCheck, NamesTheSmallestRing) {
  RunOptions options = quick_options();
  options.ring_rows = parse_ring_rows("1");
  try {
    run_check(small_spec({64}), options);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kArgument);
    const std::string message = error.what();
    EXPECT_NE(message.find("ring-rows: 1"), std::string::npos) << message;
    EXPECT_NE(message.find(std::to_string(Workspace::min_ring_rows())), std::string::npos) << message;
  }
}

TEST(LostRank, AllOthersTimeOutInEveryPhase) {
  RunOptions options = quick_options();
  options.workspace.timeout_s = 0.5;
  for (const char* lost : {"1:schedule", "2", "0:backward"}) {
    const auto outcomes = run_with_lost_rank(small_spec({20, 0, 9, 3}), options, parse_lost_rank(lost));
    ASSERT_EQ(outcomes.size(), 3u);
    for (const RankOutcome& outcome : outcomes) {
      EXPECT_TRUE(outcome.timed_out) << lost << ": rank " << outcome.rank << ": " << outcome.error;
      EXPECT_NE(outcome.error.find(std::string("rank ") + lost[0]), std::string::npos) << outcome.error;
    }
  }
}

TEST(LostRank, MustBeOneOfSeveral) {
  EXPECT_THROW(run_with_lost_rank(small_spec({20}), quick_options(), {}), Error);
  EXPECT_THROW(run_with_lost_rank(small_spec({20, 20}), quick_options(), {2, Phase::kForward}), Error);
}

TEST(RunOptionsText, IsReadOrRefused) {
  EXPECT_EQ(parse_ring_rows("96").numerator, 96);
  EXPECT_EQ(parse_ring_rows("1/8").denominator, 8);
  EXPECT_EQ(parse_saved_rows("0").numerator, 0);
  EXPECT_EQ(parse_lost_rank("3").rank, 3);
  EXPECT_EQ(parse_lost_rank("3:schedule").phase, Phase::kSchedule);
  for (const char* text : {"", "x", "-1", "1/0", "1/", "/8", "1.5", "all"}) EXPECT_THROW(parse_ring_rows(text), Error);
  for (const char* text : {"", "min", "full", "2x"}) EXPECT_THROW(parse_saved_rows(text), Error);
  for (const char* text : {"", "-1", "1:", "1:combine", "x"}) EXPECT_THROW(parse_lost_rank(text), Error);
}

TEST(ReportJson, HoldsWhatScriptsReadAndStaysJsonWithoutLimit) {
  Report report = run_check(small_spec({64}), quick_options());
  const auto json = nlohmann::json::parse(to_json(report));
  EXPECT_TRUE(json["ok"].get<bool>());
  EXPECT_EQ(json["engine"], "cpu");
  EXPECT_EQ(json["skipped_ids"], 0);
  EXPECT_TRUE(json["repeats_identical"].get<bool>());
  EXPECT_GT(json["seconds"].get<double>(), 0.0);
  for (const char* name : {"out", "dx", "dtopk_weights", "dw13", "dw2", "dshared_w13", "dshared_w2"}) {
    const auto& tensor = json["tensors"][name];
    for (const char* field : {"rel", "rel_worst_column_block", "rel_worst_row", "bound"}) {
      EXPECT_TRUE(tensor[field].is_number()) << name << " " << field;
    }
    EXPECT_EQ(tensor["digest"].get<std::string>().size(), 16u);
    EXPECT_EQ(tensor.contains("rel_worst_expert"), std::string(name) == "dw13" || std::string(name) == "dw2");
  }
  report.tensors[0].errors.rel = std::numeric_limits<double>::infinity();
  const auto broken = nlohmann::json::parse(to_json(report));
  EXPECT_FALSE(broken["ok"].get<bool>());
  EXPECT_GT(broken["tensors"]["out"]["rel"].get<double>(), 1e300);
  report.tensors[0].errors.rel = 0.0;
  report.repeats_identical = false;
  EXPECT_FALSE(report.ok());
  report.repeats_identical = true;
  report.skipped_ids = 1;
  EXPECT_FALSE(report.ok());
}

}  // namespace
}  // namespace clowder::check

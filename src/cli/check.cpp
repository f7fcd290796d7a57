// `clowder check`: runs one layer on seeded data and compares it with the fp64 reference.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "check/run.h"
#include "cli/commands.h"
#include "cli/layer_options.h"

namespace clowder::cli {
namespace {

struct Arguments : LayerArguments {
  std::string lost_rank;
};

std::string first_error(const std::vector<check::RankOutcome>& outcomes) {
  for (const check::RankOutcome& outcome : outcomes) {
    if (!outcome.error.empty()) return outcome.error;
  }
  return "no rank noticed that one was lost";
}

int report_lost_rank(const std::vector<check::RankOutcome>& outcomes, bool json) {
  const bool all_timed_out =
      std::all_of(outcomes.begin(), outcomes.end(), [](const check::RankOutcome& o) { return o.timed_out; });
  const char* code = to_string(all_timed_out ? ErrorCode::kTimeout : ErrorCode::kInternal);
  nlohmann::ordered_json object = {{"ok", false}, {"error", {{"code", code}, {"message", first_error(outcomes)}}}};
  for (const check::RankOutcome& outcome : outcomes) {
    const std::string text = outcome.error.empty() ? "its calls returned" : outcome.error;
    object["ranks"].push_back({{"rank", outcome.rank}, {"timed_out", outcome.timed_out}, {"error", text}});
    if (!json) std::printf("rank %d: %s\n", outcome.rank, text.c_str());
  }
  if (json) std::printf("%s\n", object.dump().c_str());
  std::fprintf(stderr, "clowder: %s\n", first_error(outcomes).c_str());
  return all_timed_out ? kTimedOut : kCheckFailed;
}

int run(Arguments& arguments, bool json) {
  interpret(arguments);
  if (!arguments.lost_rank.empty()) {
    const check::LostRank lost = check::parse_lost_rank(arguments.lost_rank);
    std::vector<check::RankOutcome> outcomes;
    {
      const ProgressLine progress("check", arguments.options);
      outcomes = check::run_with_lost_rank(arguments.spec, arguments.options, lost);
    }
    return report_lost_rank(outcomes, json);
  }
  check::Report report;
  {
    const ProgressLine progress("check", arguments.options);
    report = check::run_check(arguments.spec, arguments.options);
  }
  std::printf("%s%s", (json ? check::to_json(report) : check::to_text(report)).c_str(), json ? "\n" : "");
  return report.ok() ? kFine : kCheckFailed;
}

}  // namespace

void add_check_command(CLI::App& program, Chosen& chosen) {
  CLI::App* command = program.add_subcommand("check", "run one layer and compare it with the fp64 reference");
  // Scripts append options to override earlier ones.
  command->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  const auto arguments = std::make_shared<Arguments>();
  add_shape_options(*command, *arguments);
  add_data_options(*command, *arguments);
  add_tuning_options(*command, *arguments);
  add_stress_options(*command, *arguments);
  command->add_flag("--forward-only", arguments->spec.forward_only, "no backward");
  command->add_option("--repeat", arguments->options.repeat, "steps, all of which must give the same bits")
      ->capture_default_str();
  command->add_option("--lose-rank", arguments->lost_rank, "R or R:PHASE: that rank makes no call from that phase on");
  command->add_flag("--json", chosen.json, "print one JSON object");
  command->callback(
      [&chosen, arguments] { chosen.run = [&chosen, arguments] { return run(*arguments, chosen.json); }; });
}

}  // namespace clowder::cli

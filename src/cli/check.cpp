// `clowder check`: runs one layer on seeded data and compares it with the fp64 reference.
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "check/run.h"
#include "cli/commands.h"
#include "engine/engine.h"
#include "model/activation/name.h"

namespace clowder::cli {
namespace {

// Options as they stand on the command line.
struct Arguments {
  std::string engine = "cpu";
  int ranks = 1;
  std::string tokens = "256";
  std::string activation = "swiglu";
  std::string routing = "uniform";
  std::string topk_weights = "uniform";
  std::string gradient_mode = "bf16";
  std::string ring_rows;
  std::string saved_rows;
  std::string lost_rank;
  check::ProblemSpec spec;
  check::RunOptions options;
};

std::int64_t parse_tokens_of_rank(const std::string& text, const std::string& all) {
  std::int64_t tokens = 0;
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, tokens);
  if (error == std::errc{} && stopped == end && tokens >= 0) return tokens;
  throw Error(ErrorCode::kArgument,
              "tokens: \"" + all + "\", must be a total or one number a rank, as in 256 or 17,16,7,1");
}

std::vector<std::int64_t> parse_tokens(const std::string& text, int ranks) {
  std::vector<std::int64_t> tokens;
  for (std::size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
    end = text.find(',', begin);
    tokens.push_back(parse_tokens_of_rank(text.substr(begin, end - begin), text));
  }
  if (text.find(',') == std::string::npos) return check::split_tokens(tokens[0], ranks);
  if (static_cast<int>(tokens.size()) == ranks) return tokens;
  throw Error(ErrorCode::kArgument, "tokens: \"" + text + "\" has " + std::to_string(tokens.size()) +
                                        " numbers, must have one for each of " + std::to_string(ranks) + " ranks");
}

EngineKind parse_engine(const std::string& name) {
  for (const EngineKind kind : {EngineKind::kCpu, EngineKind::kSm90}) {
    if (name == to_string(kind)) return kind;
  }
  throw Error(ErrorCode::kArgument, "engine: \"" + name + "\", must be cpu or sm90");
}

void interpret(Arguments& arguments) {
  arguments.options.workspace.engine = parse_engine(arguments.engine);
  engine_type(arguments.options.workspace.engine);  // throws, before any work, where it is not built
  check::ProblemSpec& spec = arguments.spec;
  spec.tokens_per_rank = parse_tokens(arguments.tokens, arguments.ranks);
  spec.activation = parse_activation(arguments.activation);
  spec.routing = check::parse_routing(arguments.routing);
  spec.topk_weights = check::parse_topk_weights(arguments.topk_weights);
  spec.gradient_mode = check::parse_gradient_mode(arguments.gradient_mode);
  check::RunOptions& options = arguments.options;
  if (!arguments.ring_rows.empty()) options.ring_rows = check::parse_ring_rows(arguments.ring_rows);
  if (!arguments.saved_rows.empty()) options.saved_rows = check::parse_saved_rows(arguments.saved_rows);
  options.threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  if (isatty(fileno(stderr)) != 0) {
    options.progress = [](const char* stage) { std::fprintf(stderr, "\r\033[Kclowder check: %s", stage); };
  }
}

void end_progress() {
  if (isatty(fileno(stderr)) != 0) std::fprintf(stderr, "\r\033[K");
}

// Erases the line of progress, however its scope is left.
struct ProgressLine {
  ~ProgressLine() { end_progress(); }
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
      const ProgressLine progress;
      outcomes = check::run_with_lost_rank(arguments.spec, arguments.options, lost);
    }
    return report_lost_rank(outcomes, json);
  }
  check::Report report;
  {
    const ProgressLine progress;
    report = check::run_check(arguments.spec, arguments.options);
  }
  std::printf("%s%s", (json ? check::to_json(report) : check::to_text(report)).c_str(), json ? "\n" : "");
  return report.ok() ? kFine : kCheckFailed;
}

void add_data_options(CLI::App& command, Arguments& arguments) {
  check::ProblemSpec& spec = arguments.spec;
  command.add_option("--ranks", arguments.ranks, "expert-parallel ranks, all in this process")->capture_default_str();
  command
      .add_option("--tokens", arguments.tokens, "a total, split as evenly as can be, or one number a rank: 17,16,7,1")
      ->capture_default_str();
  command.add_option("--hidden", spec.hidden, "hidden width H")->capture_default_str();
  command.add_option("--intermediate", spec.intermediate, "intermediate width I of an expert")->capture_default_str();
  command.add_option("--shared-intermediate", spec.shared_intermediate, "that of the shared expert; 0 = none")
      ->capture_default_str();
  command.add_option("--experts", spec.num_experts, "experts E over all ranks")->capture_default_str();
  command.add_option("--topk", spec.topk, "experts K of a token")->capture_default_str();
  command.add_option("--activation", arguments.activation, kActivationNames)->capture_default_str();
  command.add_option("--routing", arguments.routing, "uniform, zipf:S, hot:F, one:E or file:PATH")
      ->capture_default_str();
  command.add_option("--drop", spec.drop, "fraction of slots without a route")->capture_default_str();
  command.add_option("--bad-ids", spec.bad_ids, "slots whose expert id is out of range")->capture_default_str();
  command.add_option("--topk-weights", arguments.topk_weights, "uniform, zeros, signed or unnormalised")
      ->capture_default_str();
  command.add_option("--scale", spec.scale, "standard deviation of activations")->capture_default_str();
  command.add_option("--wgrad", arguments.gradient_mode, "bf16, fp32, accumulate-fp32 or accumulate-bf16")
      ->capture_default_str();
  command.add_option("--seed", spec.seed, "of data and routes")->capture_default_str();
  command.add_flag("--forward-only", spec.forward_only, "no backward");
}

void add_run_options(CLI::App& command, Arguments& arguments) {
  WorkspaceOptions& workspace = arguments.options.workspace;
  command.add_option("--engine", arguments.engine, "cpu or sm90")->capture_default_str();
  command.add_option("--ring-rows", arguments.ring_rows, "rows a pass holds at once: N, min, a fraction or full");
  command.add_option("--saved-rows", arguments.saved_rows, "rows not recomputed in backward: N, a fraction or all");
  command.add_option("--chunk-rows", workspace.chunk_rows, "grain of overlap")->check(CLI::PositiveNumber);
  command.add_option("--blocks", workspace.blocks, "math workers, each with a copy agent")->check(CLI::PositiveNumber);
  command.add_flag("--keep-x", workspace.keep_x, "keep pulled rows for backward");
  command.add_flag("--poison", workspace.poison, "every buffer holds NaN first");
  command.add_flag("--jitter", arguments.options.jitter, "random delays in copies and tasks");
  command.add_option("--repeat", arguments.options.repeat, "steps, all of which must give the same bits")
      ->capture_default_str();
  command.add_option("--timeout", workspace.timeout_s, "limit of every wait in seconds")->capture_default_str();
  command.add_option("--lose-rank", arguments.lost_rank, "R or R:PHASE: that rank makes no call from that phase on");
}

}  // namespace

void add_check_command(CLI::App& program, Chosen& chosen) {
  CLI::App* command = program.add_subcommand("check", "run one layer and compare it with the fp64 reference");
  // Scripts append options to override earlier ones.
  command->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  const auto arguments = std::make_shared<Arguments>();
  add_data_options(*command, *arguments);
  add_run_options(*command, *arguments);
  command->add_flag("--json", chosen.json, "print one JSON object");
  command->callback(
      [&chosen, arguments] { chosen.run = [&chosen, arguments] { return run(*arguments, chosen.json); }; });
}

}  // namespace clowder::cli

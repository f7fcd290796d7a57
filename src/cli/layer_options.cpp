#include "cli/layer_options.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <thread>

#include "engine/engine.h"
#include "model/activation/name.h"

namespace clowder::cli {
namespace {

std::int64_t parse_tokens_of_rank(const std::string& text, const std::string& all) {
  std::int64_t tokens = 0;
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, tokens);
  if (error == std::errc{} && stopped == end && tokens >= 0) return tokens;
  throw Error(ErrorCode::kArgument,
              "tokens: \"" + all + "\", must be a total or one number a rank, as in 256 or 17,16,7,1");
}

EngineKind parse_engine(const std::string& name) {
  for (const EngineKind kind : {EngineKind::kCpu, EngineKind::kSm90}) {
    if (name == to_string(kind)) return kind;
  }
  throw Error(ErrorCode::kArgument, "engine: \"" + name + "\", must be cpu or sm90");
}

bool shows_progress() { return isatty(fileno(stderr)) != 0; }

}  // namespace

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

void interpret(LayerArguments& arguments) {
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
}

ProgressLine::ProgressLine(const char* command, check::RunOptions& options) {
  if (!shows_progress()) return;
  options.progress = [command](const char* stage) { std::fprintf(stderr, "\r\033[Kclowder %s: %s", command, stage); };
}

ProgressLine::~ProgressLine() {
  if (shows_progress()) std::fprintf(stderr, "\r\033[K");
}

void add_shape_options(CLI::App& command, LayerArguments& arguments) {
  check::ProblemSpec& spec = arguments.spec;
  command.add_option("--engine", arguments.engine, "cpu or sm90")->capture_default_str();
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
}

void add_data_options(CLI::App& command, LayerArguments& arguments) {
  check::ProblemSpec& spec = arguments.spec;
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
}

void add_tuning_options(CLI::App& command, LayerArguments& arguments) {
  WorkspaceOptions& workspace = arguments.options.workspace;
  command.add_option("--ring-rows", arguments.ring_rows, "rows a pass holds at once: N, min, a fraction or full");
  command.add_option("--saved-rows", arguments.saved_rows, "rows not recomputed in backward: N, a fraction or all");
  command.add_option("--chunk-rows", workspace.chunk_rows, "grain of overlap")->check(CLI::PositiveNumber);
  command.add_option("--blocks", workspace.blocks, "math workers, each with a copy agent")->check(CLI::PositiveNumber);
  command.add_flag("--keep-x", workspace.keep_x, "keep pulled rows for backward");
}

void add_stress_options(CLI::App& command, LayerArguments& arguments) {
  WorkspaceOptions& workspace = arguments.options.workspace;
  command.add_flag("--poison", workspace.poison, "every buffer holds NaN first");
  command.add_flag("--jitter", arguments.options.jitter, "random delays in copies and tasks");
  command.add_option("--timeout", workspace.timeout_s, "limit of every wait in seconds")->capture_default_str();
}

}  // namespace clowder::cli

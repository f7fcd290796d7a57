// `clowder bench`: times one layer.
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/cases.h"
#include "bench/layer.h"
#include "bench/row.h"
#include "cli/commands.h"
#include "cli/layer_options.h"

namespace clowder::cli {
namespace {

struct Arguments : LayerArguments {
  std::string case_name;
  std::vector<std::string> passes = {"forward", "forward+backward"};
  double scale_tokens = 1.0;
  bench::MeasureOptions measure;
  int emulated_peers = 0;
  double link_gbs = 0.0;
};

// A case fixes the shape; data and tuning stay those of the command line.
void take_case(Arguments& arguments) {
  const check::ProblemSpec of_case = bench::make_spec(bench::find_case(arguments.case_name), arguments.scale_tokens);
  check::ProblemSpec& spec = arguments.spec;
  spec.tokens_per_rank = of_case.tokens_per_rank;
  spec.hidden = of_case.hidden;
  spec.intermediate = of_case.intermediate;
  spec.shared_intermediate = of_case.shared_intermediate;
  spec.num_experts = of_case.num_experts;
  spec.topk = of_case.topk;
}

void refuse_emulation(const Arguments& arguments) {
  if (arguments.emulated_peers == 0 && arguments.link_gbs == 0.0) return;
  throw Error(
      ErrorCode::kUnsupported,
      "emulate-peers: the cpu engine has no links to emulate; use --ranks R for virtual ranks, or a GPU engine");
}

void print(const std::vector<bench::Row>& rows, bool json) {
  if (json) {
    nlohmann::ordered_json object = {{"rows", nlohmann::ordered_json::array()}};
    for (const bench::Row& row : rows) object["rows"].push_back(nlohmann::ordered_json::parse(bench::to_json(row)));
    std::printf("%s\n", object.dump().c_str());
    return;
  }
  for (const bench::Row& row : rows) std::printf("%s", bench::to_text(row).c_str());
}

std::vector<bench::Row> time_passes(Arguments& arguments, const std::vector<bench::TimedPass>& passes) {
  const ProgressLine progress("bench", arguments.options);
  arguments.options.progress("data");
  const auto layer = bench::make_layer(arguments.spec, arguments.options);
  std::vector<bench::Row> rows;
  for (const bench::TimedPass pass : passes) {
    arguments.options.progress(bench::to_string(pass));
    bench::Row& row = rows.emplace_back();
    row.case_name = arguments.case_name;
    row.engine = arguments.engine;
    row.pass = pass;
    row.spec = arguments.spec;
    row.scale_tokens = arguments.scale_tokens;
    bench::measure_row(*layer, arguments.measure, row);
  }
  return rows;
}

int run(Arguments& arguments, bool json) {
  interpret(arguments);
  refuse_emulation(arguments);
  if (!arguments.case_name.empty()) take_case(arguments);
  std::vector<bench::TimedPass> passes;
  for (const std::string& pass : arguments.passes) passes.push_back(bench::parse_timed_pass(pass));

  print(time_passes(arguments, passes), json);
  return kFine;
}

std::string case_names() {
  std::string names;
  for (const bench::Case& layer : bench::all_cases()) names += (names.empty() ? "" : ", ") + std::string(layer.name);
  return names;
}

}  // namespace

void add_bench_command(CLI::App& program, Chosen& chosen) {
  CLI::App* command = program.add_subcommand("bench", "time one layer");
  command->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  const auto arguments = std::make_shared<Arguments>();
  add_shape_options(*command, *arguments);
  CLI::Option* scale = command->add_option("--scale-tokens", arguments->scale_tokens, "part of a case's tokens to run");
  CLI::Option* named = command->add_option("--case", arguments->case_name, case_names());
  scale->capture_default_str()->needs(named);
  for (const char* shape :
       {"--ranks", "--tokens", "--hidden", "--intermediate", "--shared-intermediate", "--experts", "--topk"}) {
    named->excludes(command->get_option(shape));
  }
  command
      ->add_option("--pass", arguments->passes, "schedule, forward, backward or forward+backward; several may be given")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->capture_default_str();
  command->add_option("--repeats", arguments->measure.blocks, "blocks; their median counts")->capture_default_str();
  command->add_option("--block-ms", arguments->measure.block_ms, "least length of a block")->capture_default_str();
  command->add_option("--emulate-peers", arguments->emulated_peers, "ranks of a group of which one runs (GPU engines)");
  command->add_option("--link-gbs", arguments->link_gbs, "bandwidth of the emulated link in GB/s, one direction");
  add_data_options(*command, *arguments);
  add_tuning_options(*command, *arguments);
  command->add_flag("--json", chosen.json, "print one JSON object");
  command->callback(
      [&chosen, arguments] { chosen.run = [&chosen, arguments] { return run(*arguments, chosen.json); }; });
}

}  // namespace clowder::cli

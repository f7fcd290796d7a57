// `clowder trace`: runs one step and writes its timeline.
#include "bench/trace.h"

#include <cstdio>
#include <memory>

#include "cli/commands.h"
#include "cli/layer_options.h"

namespace clowder::cli {
namespace {

struct Arguments : LayerArguments {
  std::string file;
  std::string pass = "forward+backward";
};

int run(Arguments& arguments, bool json) {
  interpret(arguments);
  const bench::TimedPass pass = bench::parse_timed_pass(arguments.pass);
  if (pass == bench::TimedPass::kSchedule) {
    throw Error(ErrorCode::kArgument, "pass: \"schedule\", must be forward, backward or forward+backward");
  }
  bench::TraceReport report;
  {
    const ProgressLine progress("trace", arguments.options);
    arguments.options.progress("engine");
    report = bench::run_trace(arguments.spec, arguments.options, pass, arguments.file);
  }
  std::printf("%s%s", (json ? bench::to_json(report) : bench::to_text(report)).c_str(), json ? "\n" : "");
  return kFine;
}

}  // namespace

void add_trace_command(CLI::App& program, Chosen& chosen) {
  CLI::App* command = program.add_subcommand("trace", "run one step and write a timeline that Perfetto opens");
  command->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  const auto arguments = std::make_shared<Arguments>();
  command->add_option("--out", arguments->file, "the file to write")->required();
  command->add_option("--pass", arguments->pass, "forward, backward or forward+backward")->capture_default_str();
  add_shape_options(*command, *arguments);
  add_data_options(*command, *arguments);
  add_tuning_options(*command, *arguments);
  add_stress_options(*command, *arguments);
  command->add_flag("--json", chosen.json, "print one JSON object");
  command->callback(
      [&chosen, arguments] { chosen.run = [&chosen, arguments] { return run(*arguments, chosen.json); }; });
}

}  // namespace clowder::cli

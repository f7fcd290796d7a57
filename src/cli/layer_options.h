// The options that commands share which run a layer: its shape, its data, and how it runs.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "check/problem.h"
#include "check/run.h"

namespace clowder::cli {

// Options as they stand on the command line; interpret() turns the texts into `spec` and `options`.
struct LayerArguments {
  std::string engine = "cpu";
  int ranks = 1;
  std::string tokens = "256";
  std::string activation = "swiglu";
  std::string routing = "uniform";
  std::string topk_weights = "uniform";
  std::string gradient_mode = "bf16";
  std::string ring_rows;
  std::string saved_rows;
  check::ProblemSpec spec;
  check::RunOptions options;
};

void add_shape_options(CLI::App& command, LayerArguments& arguments);
void add_data_options(CLI::App& command, LayerArguments& arguments);
void add_tuning_options(CLI::App& command, LayerArguments& arguments);
// For tests of the engine: poison, jitter, time limit.
void add_stress_options(CLI::App& command, LayerArguments& arguments);

// Throws Error(kArgument) for texts that mean nothing, and Error(kUnsupported) for an engine that is not here.
void interpret(LayerArguments& arguments);

// "N" or "a,b,c": a total over the ranks, or one number for each; throws Error(kArgument).
std::vector<std::int64_t> parse_tokens(const std::string& text, int ranks);

// Shows on a terminal what `command` is at, and erases that line, however its scope is left.
class ProgressLine {
 public:
  ProgressLine(const char* command, check::RunOptions& options);
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;
};

}  // namespace clowder::cli

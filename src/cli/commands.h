// The commands of `clowder`. Each adds itself to the program, and what it does when it is chosen returns an exit code.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace clowder::cli {

enum ExitCode {
  kFine = 0,
  kCheckFailed = 1,  // or broke, by a fault of Clowder's own
  kBadArguments = 2,
  kUnsupportedHere = 3,
  kTimedOut = 4,
};

// What a parsed command is to do.
struct Chosen {
  std::function<int()> run;
  bool json = false;  // also of errors
};

void add_info_command(CLI::App& program, Chosen& chosen);
void add_check_command(CLI::App& program, Chosen& chosen);
void add_bench_command(CLI::App& program, Chosen& chosen);
void add_trace_command(CLI::App& program, Chosen& chosen);

}  // namespace clowder::cli

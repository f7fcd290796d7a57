// The command `clowder`.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/commands.h"
#include "clowder/types.h"
#include "model/version.h"

namespace clowder::cli {
namespace {

int exit_code(ErrorCode code) {
  switch (code) {
    case ErrorCode::kArgument:
      return kBadArguments;
    case ErrorCode::kUnsupported:
      return kUnsupportedHere;
    case ErrorCode::kTimeout:
      return kTimedOut;
    case ErrorCode::kInternal:
      break;
  }
  return kCheckFailed;
}

int report_error(const char* code, std::string message, int exit, bool json) {
  std::replace(message.begin(), message.end(), '\n', ' ');
  if (json) {
    const nlohmann::ordered_json object = {{"ok", false}, {"error", {{"code", code}, {"message", message}}}};
    std::printf("%s\n", object.dump().c_str());
  }
  std::fprintf(stderr, "clowder: %s\n", message.c_str());
  return exit;
}

// Whether --json was asked for, also on a command line that cannot be parsed.
bool asks_for_json(int argc, char** argv) {
  return std::any_of(argv + 1, argv + argc, [](const char* argument) { return std::string(argument) == "--json"; });
}

int run(int argc, char** argv) {
  CLI::App program("Deterministic expert-parallel mixture-of-experts layers", "clowder");
  program.set_version_flag("--version", std::string("clowder ") + kVersion);
  program.require_subcommand(1);
  Chosen chosen;
  add_info_command(program, chosen);
  add_check_command(program, chosen);
  add_bench_command(program, chosen);
  add_trace_command(program, chosen);
  try {
    program.parse(argc, argv);
  } catch (const CLI::Success& success) {  // --help, --version
    return program.exit(success);
  } catch (const CLI::ParseError& error) {
    const std::string hint = "; see clowder --help";
    return report_error(to_string(ErrorCode::kArgument), error.what() + hint, kBadArguments, asks_for_json(argc, argv));
  }
  try {
    return chosen.run();
  } catch (const Error& error) {
    return report_error(to_string(error.code()), error.what(), exit_code(error.code()), chosen.json);
  } catch (const std::bad_alloc&) {
    return report_error(to_string(ErrorCode::kUnsupported), "this machine has too little memory for that shape",
                        kUnsupportedHere, chosen.json);
  } catch (const std::exception& error) {
    return report_error(to_string(ErrorCode::kInternal), error.what(), kCheckFailed, chosen.json);
  }
}

}  // namespace
}  // namespace clowder::cli

// Only a machine without memory throws from the set-up of the commands.
// NOLINTNEXTLINE(bugprone-exception-escape)
int main(int argc, char** argv) { return clowder::cli::run(argc, argv); }

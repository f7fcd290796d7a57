// `clowder info`: what this build is and what this machine offers.
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "cli/commands.h"
#include "engine/cpu/kernels.h"
#include "engine/engine.h"
#include "model/version.h"

namespace clowder::cli {
namespace {

std::string first_line_with(const char* path, const std::string& start) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (line.starts_with(start)) return line;
  }
  return "";
}

std::string cpu_model() {
  const std::string line = first_line_with("/proc/cpuinfo", "model name");
  const std::size_t colon = line.find(": ");
  return colon == std::string::npos ? "unknown" : line.substr(colon + 2);
}

// Of the kernel module, where there is one.
std::string gpu_driver() {
  const std::string line = first_line_with("/proc/driver/nvidia/version", "NVRM version:");
  const std::size_t start = line.find_first_not_of(' ', line.find(':') + 1);
  return line.empty() || start == std::string::npos ? "none" : line.substr(start);
}

nlohmann::ordered_json engine_info(EngineKind kind) { return {{"built", is_built(kind)}, {"usable", is_usable(kind)}}; }

std::string engine_text(const nlohmann::ordered_json& engine) {
  if (!engine["built"].get<bool>()) return "not in this build";
  return engine["usable"].get<bool>() ? "usable" : "built, not usable here";
}

nlohmann::ordered_json collect() {
  return {
      {"version", kVersion},
      {"engines", {{"cpu", engine_info(EngineKind::kCpu)}, {"sm90", engine_info(EngineKind::kSm90)}}},
      {"cpu",
       {{"model", cpu_model()},
        {"cores", std::thread::hardware_concurrency()},
        {"instruction_set", cpu::cpu_engine_isa()}}},
      {"gpu", {{"driver", gpu_driver()}}},
  };
}

int run(bool json) {
  const nlohmann::ordered_json info = collect();
  if (json) {
    std::printf("%s\n", info.dump().c_str());
    return kFine;
  }
  std::printf("clowder %s\n", kVersion);
  const nlohmann::ordered_json& engines = info["engines"];
  std::printf("engines      cpu (%s), sm90 (%s)\n", engine_text(engines["cpu"]).c_str(),
              engine_text(engines["sm90"]).c_str());
  std::printf("cpu          %s, %u cores, kernels for %s\n", info["cpu"]["model"].get<std::string>().c_str(),
              info["cpu"]["cores"].get<unsigned>(), info["cpu"]["instruction_set"].get<std::string>().c_str());
  std::printf("gpu driver   %s\n", info["gpu"]["driver"].get<std::string>().c_str());
  return kFine;
}

}  // namespace

void add_info_command(CLI::App& program, Chosen& chosen) {
  CLI::App* command = program.add_subcommand("info", "version, engines built and usable, facts of this machine");
  command->add_flag("--json", chosen.json, "print one JSON object");
  command->callback([&chosen] { chosen.run = [&chosen] { return run(chosen.json); }; });
}

}  // namespace clowder::cli

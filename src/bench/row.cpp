#include "bench/row.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

namespace clowder::bench {
namespace {

bool saves(TimedPass pass) { return pass != TimedPass::kSchedule; }

double teraflops(const Row& row) { return row.flops() / (row.clowder.median * 1e-3) * 1e-12; }

}  // namespace

double Row::flops() const {
  const auto routed = static_cast<double>(spec.tokens() * spec.topk * spec.intermediate);
  const auto shared = static_cast<double>(spec.tokens() * spec.shared_intermediate);
  const double forward = 6.0 * (routed + shared) * static_cast<double>(spec.hidden);
  switch (pass) {
    case TimedPass::kSchedule:
      return 0.0;
    case TimedPass::kForward:
      return forward;
    case TimedPass::kBackward:
      return 2.0 * forward;
    case TimedPass::kForwardBackward:
      break;
  }
  return 3.0 * forward;
}

void measure_row(TimedLayer& layer, const MeasureOptions& options, Row& row) {
  row.clowder = measure(options, [&] { return layer.run(row.pass); });
  row.blocks = options.blocks;
  constexpr double kGib = 1024.0 * 1024.0 * 1024.0;
  if (saves(row.pass)) row.saved_gib = static_cast<double>(layer.saved_bytes()) / kGib;
}

std::string to_json(const Row& row) {
  const check::ProblemSpec& spec = row.spec;
  const auto [least, most] = std::minmax_element(spec.tokens_per_rank.begin(), spec.tokens_per_rank.end());
  nlohmann::ordered_json json;
  if (!row.case_name.empty()) json["case"] = row.case_name;
  json["pass"] = to_string(row.pass);
  json["engine"] = row.engine;
  json["ranks"] = spec.num_ranks();
  json["T"] = *most;
  if (*least != *most) json["tokens_per_rank"] = spec.tokens_per_rank;
  json["H"] = spec.hidden;
  json["I"] = spec.intermediate;
  json["E"] = spec.num_experts;
  json["K"] = spec.topk;
  json["shared"] = spec.shared_intermediate > 0;
  json["Is"] = spec.shared_intermediate;
  if (row.scale_tokens != 1.0) json["scale_tokens"] = row.scale_tokens;
  json["clowder_ms"] = row.clowder.median;
  json["clowder_ms_spread"] = {row.clowder.lowest, row.clowder.highest};
  json["blocks"] = row.blocks;
  json["steps"] = row.clowder.steps;
  if (row.flops() > 0.0) json["clowder_tflops"] = teraflops(row);
  if (row.saved_gib) json["saved_gib"] = *row.saved_gib;
  if (row.emulated_peers) json["emulated_peers"] = *row.emulated_peers;
  return json.dump();
}

std::string to_text(const Row& row) {
  const check::ProblemSpec& spec = row.spec;
  char line[256];
  std::snprintf(line, sizeof line, "%-17s %-17s R %-3d T %-7lld %10.3f ms  [%.3f, %.3f]",
                row.case_name.empty() ? "layer" : row.case_name.c_str(), to_string(row.pass), spec.num_ranks(),
                static_cast<long long>(*std::max_element(spec.tokens_per_rank.begin(), spec.tokens_per_rank.end())),
                row.clowder.median, row.clowder.lowest, row.clowder.highest);
  std::string text = line;
  if (row.flops() > 0.0) {
    std::snprintf(line, sizeof line, "  %.3f TFLOP/s", teraflops(row));
    text += line;
  }
  return text + "\n";
}

}  // namespace clowder::bench

#include "bench/trace.h"

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "bench/layer.h"

namespace clowder::bench {
namespace {

double to_ms(double nanoseconds) { return nanoseconds * 1e-6; }
double to_ms(std::int64_t nanoseconds) { return to_ms(static_cast<double>(nanoseconds)); }

double percent(double part, double whole) { return whole > 0.0 ? 100.0 * part / whole : 0.0; }

nlohmann::ordered_json pass_json(const PassSummary& pass) {
  const double wall = to_ms(pass.wall_ns);
  return {{"pass", plan::to_string(pass.pass)},
          {"ms", wall},
          {"exposed_ms", to_ms(pass.exposed_ns())},
          {"exposed_percent", percent(to_ms(pass.exposed_ns()), wall)},
          {"math_workers", pass.math_workers},
          {"math_ms", to_ms(pass.math_ns)},
          {"epilogue_ms", to_ms(pass.epilogue_ns)},
          {"reduce_ms", to_ms(pass.reduce_ns)},
          {"wait_copies_ms", to_ms(pass.wait_copies_ns)},
          {"wait_peers_ms", to_ms(pass.wait_peers_ns)},
          {"wait_math_ms", to_ms(pass.wait_math_ns)},
          {"idle_ms", to_ms(pass.idle_ns)},
          {"copy_ms", to_ms(pass.copy_ns)}};
}

}  // namespace

double TraceReport::layer_ms() const {
  double sum = 0.0;
  for (const PassSummary& pass : passes) {
    if (pass.math_workers > 0) sum += to_ms(pass.wall_ns);
  }
  return sum;
}

double TraceReport::exposed_ms() const {
  double sum = 0.0;
  for (const PassSummary& pass : passes) sum += to_ms(pass.exposed_ns());
  return sum;
}

double TraceReport::exposed_percent() const { return percent(exposed_ms(), layer_ms()); }

TraceReport run_trace(const check::ProblemSpec& spec, const check::RunOptions& options, TimedPass pass,
                      const std::string& file) {
  // Before the work, so that a bad name costs nothing.
  std::ofstream out(file);
  if (!out) throw Error(ErrorCode::kArgument, "out: \"" + file + "\", must be a file that can be written");
  Timeline timeline;
  check::RunOptions recorded = options;
  recorded.workspace.timeline = &timeline;
  const auto layer = make_layer(spec, recorded);
  layer->run(pass);
  timeline.clear();
  layer->run(pass);
  write_chrome_trace(timeline, out);
  out.close();
  if (!out) throw Error(ErrorCode::kArgument, "out: \"" + file + "\", the file system took only a part of it");

  TraceReport report{to_string(options.workspace.engine), file, timeline.num_events(), timeline.num_dropped(), {}};
  for (const TimelinePass& recorded_pass : timeline.passes()) report.passes.push_back(summarise(recorded_pass));
  return report;
}

std::string to_json(const TraceReport& report) {
  nlohmann::ordered_json json = {{"ok", true},
                                 {"engine", report.engine},
                                 {"file", report.file},
                                 {"events", report.events},
                                 {"dropped_events", report.dropped_events},
                                 {"ms", report.layer_ms()},
                                 {"exposed_ms", report.exposed_ms()},
                                 {"exposed_percent", report.exposed_percent()},
                                 {"passes", nlohmann::ordered_json::array()}};
  for (const PassSummary& pass : report.passes) json["passes"].push_back(pass_json(pass));
  return json.dump();
}

std::string to_text(const TraceReport& report) {
  std::string text = "ms, math workers' times added up\n";
  char line[256];
  std::snprintf(line, sizeof line, "%-9s%9s%9s%9s%9s%9s%13s%13s%11s%9s\n", "pass", "wall", "workers", "math",
                "epilogue", "reduce", "wait copies", "wait peers", "wait math", "idle");
  text += line;
  for (const PassSummary& pass : report.passes) {
    std::snprintf(line, sizeof line, "%-9s%9.3f%9d%9.3f%9.3f%9.3f%13.3f%13.3f%11.3f%9.3f\n", plan::to_string(pass.pass),
                  to_ms(pass.wall_ns), pass.math_workers, to_ms(pass.math_ns), to_ms(pass.epilogue_ns),
                  to_ms(pass.reduce_ns), to_ms(pass.wait_copies_ns), to_ms(pass.wait_peers_ns),
                  to_ms(pass.wait_math_ns), to_ms(pass.idle_ns));
    text += line;
  }
  std::snprintf(line, sizeof line, "exposed communication: %.3f ms, %.1f %% of the layer's %.3f ms\n",
                report.exposed_ms(), report.exposed_percent(), report.layer_ms());
  text += line;
  text += report.file + ": " + std::to_string(report.events) + " events; open it at https://ui.perfetto.dev\n";
  if (report.dropped_events > 0) {
    text += std::to_string(report.dropped_events) + " events found no room: the sums are too small\n";
  }
  return text;
}

}  // namespace clowder::bench

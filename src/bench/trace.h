// One step of a layer, recorded: a file for Perfetto, and where the time went.
#pragma once

#include <string>
#include <vector>

#include "bench/measure.h"
#include "check/problem.h"
#include "check/run.h"
#include "observe/timeline.h"

namespace clowder::bench {

struct TraceReport {
  std::string engine;
  std::string file;
  std::int64_t events = 0;
  std::int64_t dropped_events = 0;
  std::vector<PassSummary> passes;

  // Of the passes that have math workers: the layer's time, and what of it was exposed communication.
  double layer_ms() const;
  double exposed_ms() const;
  double exposed_percent() const;
};

// Runs the layer once unrecorded and once recorded, and writes `file`. Throws Error(kArgument) if the
// file cannot be written.
TraceReport run_trace(const check::ProblemSpec& spec, const check::RunOptions& options, TimedPass pass,
                      const std::string& file);

std::string to_json(const TraceReport& report);
std::string to_text(const TraceReport& report);

}  // namespace clowder::bench

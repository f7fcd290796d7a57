// One row of a benchmark record: a case, a pass, and what was measured. What an engine cannot measure stays empty and
// is left out of the JSON.
#pragma once

#include <optional>
#include <string>

#include "bench/layer.h"
#include "bench/measure.h"

namespace clowder::bench {

struct Row {
  std::string case_name;  // empty for a shape of the user's own
  std::string engine;
  TimedPass pass = TimedPass::kForwardBackward;
  check::ProblemSpec spec;
  double scale_tokens = 1.0;
  Timing clowder;
  int blocks = 0;
  std::optional<double> saved_gib;
  std::optional<int> emulated_peers;

  // 6 * T * (K + shared) * H * I forward, twice that backward, of all ranks; 0 for a schedule.
  double flops() const;
};

// Times one pass of a layer that has been made from `row.spec`, and fills in what was measured.
void measure_row(TimedLayer& layer, const MeasureOptions& options, Row& row);

std::string to_json(const Row& row);
std::string to_text(const Row& row);

}  // namespace clowder::bench

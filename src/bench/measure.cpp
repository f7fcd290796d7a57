#include "bench/measure.h"

#include <algorithm>

#include "clowder/types.h"

namespace clowder::bench {
namespace {

constexpr TimedPass kPasses[] = {TimedPass::kSchedule, TimedPass::kForward, TimedPass::kBackward,
                                 TimedPass::kForwardBackward};

}  // namespace

const char* to_string(TimedPass pass) {
  switch (pass) {
    case TimedPass::kSchedule:
      return "schedule";
    case TimedPass::kForward:
      return "forward";
    case TimedPass::kBackward:
      return "backward";
    case TimedPass::kForwardBackward:
      return "forward+backward";
  }
  return "unknown pass";
}

TimedPass parse_timed_pass(const std::string& text) {
  for (const TimedPass pass : kPasses) {
    if (text == to_string(pass)) return pass;
  }
  throw Error(ErrorCode::kArgument, "pass: \"" + text + "\", must be schedule, forward, backward or forward+backward");
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

Timing measure(const MeasureOptions& options, const std::function<double()>& step) {
  if (options.blocks < 1) {
    throw Error(ErrorCode::kArgument, "repeats: " + std::to_string(options.blocks) + ", must be 1 or more");
  }
  step();
  Timing timing;
  std::vector<double> means;
  for (int block = 0; block < options.blocks; ++block) {
    double total = 0.0;
    int steps = 0;
    do {
      total += step();
      ++steps;
    } while (total < options.block_ms);
    means.push_back(total / steps);
    timing.steps += steps;
  }
  timing.median = median(means);
  timing.lowest = *std::min_element(means.begin(), means.end());
  timing.highest = *std::max_element(means.begin(), means.end());
  return timing;
}

}  // namespace clowder::bench

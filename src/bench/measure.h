// Timing in sustained blocks: a block repeats a step until it has lasted long enough, and blocks are compared by their
// medians.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace clowder::bench {

// What a bench or a trace runs. kForward includes the schedule, kForwardBackward both.
enum class TimedPass { kSchedule, kForward, kBackward, kForwardBackward };

const char* to_string(TimedPass pass);
// "schedule", "forward", "backward" or "forward+backward"; throws Error(kArgument).
TimedPass parse_timed_pass(const std::string& text);

struct MeasureOptions {
  int blocks = 5;
  double block_ms = 300.0;  // a block's least length
};

// Milliseconds of one step.
struct Timing {
  double median = 0.0;
  double lowest = 0.0;   // of the blocks' means
  double highest = 0.0;  // of the blocks' means
  int steps = 0;         // in all blocks
};

// `step` runs once and returns its time in milliseconds. It runs once more before the first block, unmeasured.
Timing measure(const MeasureOptions& options, const std::function<double()>& step);

// Of a non-empty list: the middle value, or the mean of the two middle ones.
double median(std::vector<double> values);

}  // namespace clowder::bench

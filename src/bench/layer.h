// A layer with its data on some engine, as benches and traces run it.
#pragma once

#include <cstdint>
#include <memory>

#include "bench/measure.h"
#include "check/problem.h"
#include "check/run.h"

namespace clowder::bench {

class TimedLayer {
 public:
  virtual ~TimedLayer() = default;
  // Runs `pass` once and returns its time in milliseconds. kBackward runs what was forwarded last.
  virtual double run(TimedPass pass) = 0;
  // What forward leaves for backward, schedules included, of all ranks.
  virtual std::int64_t saved_bytes() const = 0;
};

// On the engine of the options, with a schedule and forward run once. Throws Error(kArgument) for shapes that no layer
// can have, and Error(kUnsupported) for an engine that cannot be timed here.
std::unique_ptr<TimedLayer> make_layer(const check::ProblemSpec& spec, const check::RunOptions& options);

}  // namespace clowder::bench

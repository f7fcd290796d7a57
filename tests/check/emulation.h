// A stand-in for an engine: the layer in fp64, rounded to bf16 exactly where DESIGN's engines round. It tells whether
// bounds hold and are tight, with no engine at hand.
#pragma once

#include "check/problem.h"
#include "check/report.h"

namespace clowder::check {

LayerTensors emulate_engine(const Problem& problem, int threads);

}  // namespace clowder::check

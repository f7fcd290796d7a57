// The engine for Hopper GPUs: one persistent kernel for each direction (forward.cuh).
#pragma once

#include "engine/engine.h"

namespace clowder::sm90 {

extern const EngineType kEngineType;

}  // namespace clowder::sm90

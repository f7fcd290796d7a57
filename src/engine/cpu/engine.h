// The CPU engine: the plan on threads.
#pragma once

#include "engine/engine.h"

namespace clowder::cpu {

extern const EngineType kEngineType;

}  // namespace clowder::cpu

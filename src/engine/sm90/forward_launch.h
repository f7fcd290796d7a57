// Launching the forward kernel.
#pragma once

#include "engine/sm90/params.h"

namespace clowder::sm90 {

// `blocks` is even: clusters have two.
void launch_forward(const ForwardParams<1>& params, int blocks, void* stream);

}  // namespace clowder::sm90

// Activations as users write them: "swiglu", "swiglu-clamp:7".
#pragma once

#include <string>

#include "clowder/types.h"

namespace clowder {

// Throws Error(kArgument) that says what is known.
Activation parse_activation(const std::string& name);

// The text that parse_activation reads back to the same activation.
std::string to_string(const Activation& activation);

}  // namespace clowder

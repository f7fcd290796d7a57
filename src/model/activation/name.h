// Activations as users write them: "swiglu", "swiglu-clamp:7".
#pragma once

#include <string>

#include "clowder/types.h"

namespace clowder {

// All of them, for help and errors.
inline constexpr const char* kActivationNames = "swiglu, swiglu-clamp:LIMIT (above 0), geglu, reglu or gpt-oss";

// Throws Error(kArgument) that says what is known.
Activation parse_activation(const std::string& name);

// The text that parse_activation reads back to the same activation.
std::string to_string(const Activation& activation);

}  // namespace clowder

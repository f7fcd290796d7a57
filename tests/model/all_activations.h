// Every activation there is, for tests that hold for all of them.
#pragma once

#include <vector>

#include "model/activation/dispatch.h"
#include "model/activation/name.h"

namespace clowder {

inline std::vector<Activation> all_activations() {
  std::vector<Activation> activations;
  for (const char* name : {"swiglu", "swiglu-clamp:7", "swiglu-clamp:0.75", "geglu", "reglu", "gpt-oss"}) {
    activations.push_back(parse_activation(name));
  }
  return activations;
}

}  // namespace clowder

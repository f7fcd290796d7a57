// From an Activation, known at run time, to its struct, known when code is compiled.
#pragma once

#include "clowder/types.h"
#include "model/activation/geglu.h"
#include "model/activation/gpt_oss.h"
#include "model/activation/reglu.h"
#include "model/activation/swiglu.h"
#include "model/activation/swiglu_clamp.h"

namespace clowder {

// Calls visit(Swiglu{}) or its like, and returns what that returns.
template <class Visit>
CLOWDER_HD_INLINE auto with_activation(const Activation& activation, Visit&& visit) {
  switch (activation.kind) {
    case ActivationKind::kSwigluClamp:
      return visit(SwigluClamp(activation.limit));
    case ActivationKind::kGeglu:
      return visit(Geglu{});
    case ActivationKind::kReglu:
      return visit(Reglu{});
    case ActivationKind::kGptOss:
      return visit(GptOss{});
    case ActivationKind::kSwiglu:
      break;
  }
  return visit(Swiglu{});
}

}  // namespace clowder

// SwiGLU: f(g, u) = silu(g) * u with silu(g) = g * sigmoid(g) (Shazeer 2020).
#pragma once

#include "model/activation/gated.h"
#include "model/elementary.h"

namespace clowder {

struct Swiglu {
  template <class Real>
  CLOWDER_HD_INLINE Real value(Real g, Real u) const {
    return g * sigmoid(g) * u;
  }

  // silu'(g) = s + g s (1 - s) with s = sigmoid(g).
  template <class Real>
  CLOWDER_HD_INLINE GatedGradient<Real> gradient(Real g, Real u) const {
    const Real s = sigmoid(g);
    const Real silu = g * s;
    return {silu * u, (s + silu * (Real{1} - s)) * u, silu};
  }
};

}  // namespace clowder

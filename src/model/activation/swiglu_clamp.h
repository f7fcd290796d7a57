// SwiGLU with a clamp: f(g, u) = silu(min(g, limit)) * clamp(u, -limit, limit).
#pragma once

#include "model/activation/swiglu.h"

namespace clowder {

struct SwigluClamp {
  float limit;

  template <class Real>
  CLOWDER_HD_INLINE Real value(Real g, Real u) const {
    return Swiglu{}.value(clamp_gate(g), clamp_up(u));
  }

  template <class Real>
  CLOWDER_HD_INLINE GatedGradient<Real> gradient(Real g, Real u) const {
    const Real most = static_cast<Real>(limit);
    GatedGradient<Real> result = Swiglu{}.gradient(clamp_gate(g), clamp_up(u));
    result.dg = g > most ? Real{0} : result.dg;
    result.du = u > most || u < -most ? Real{0} : result.du;
    return result;
  }

 private:
  // Written so that a NaN stays a NaN.
  template <class Real>
  CLOWDER_HD_INLINE Real clamp_gate(Real g) const {
    const Real most = static_cast<Real>(limit);
    return g > most ? most : g;
  }
  template <class Real>
  CLOWDER_HD_INLINE Real clamp_up(Real u) const {
    const Real most = static_cast<Real>(limit);
    const Real below = u > most ? most : u;
    return below < -most ? -most : below;
  }
};

}  // namespace clowder

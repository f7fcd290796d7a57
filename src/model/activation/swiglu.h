// SwiGLU: f(g, u) = silu(g) * u with silu(g) = g * sigmoid(g) (Shazeer 2020).
#pragma once

#include "model/activation/gated.h"
#include "model/elementary.h"

namespace clowder {

struct Swiglu : Gated<Swiglu> {
  using Piece = OnePiece;

  template <class Real>
  CLOWDER_HD_INLINE Piece piece(Real, Real) const {
    return {};
  }

  // silu'(g) = s + g s (1 - s) with s = sigmoid(g).
  template <class Real>
  CLOWDER_HD_INLINE GatedGradient<Real> gradient_on(const Piece&, Real g, Real u) const {
    const Real s = sigmoid(g);
    const Real silu = g * s;
    return {silu * u, (s + silu * (Real{1} - s)) * u, silu};
  }
};

}  // namespace clowder

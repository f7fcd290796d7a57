// SwiGLU with a clamp: f(g, u) = silu(min(g, limit)) * clamp(u, -limit, limit).
#pragma once

#include "model/activation/clamp.h"
#include "model/activation/swiglu.h"

namespace clowder {

struct SwigluClamp : Gated<SwigluClamp> {
  using Piece = GatedClamp::Piece;

  CLOWDER_HD_INLINE explicit SwigluClamp(float limit) : clamp{limit} {}

  template <class Real>
  CLOWDER_HD_INLINE Piece piece(Real g, Real u) const {
    return clamp.piece(g, u);
  }

  template <class Real>
  CLOWDER_HD_INLINE GatedGradient<Real> gradient_on(const Piece& piece, Real g, Real u) const {
    return clamp.gradient_on(piece, g, u, Swiglu{});
  }

  GatedClamp clamp;
};

}  // namespace clowder

// GeGLU: f(g, u) = gelu(g) * u (Shazeer 2020), with gelu in its tanh form (Hendrycks and Gimpel 2016),
//
//   gelu(g) = g/2 (1 + tanh z) = g sigmoid(2 z),   z = sqrt(2/pi) (g + 0.044715 g^3).
#pragma once

#include "model/activation/gated.h"
#include "model/elementary.h"

namespace clowder {

struct Geglu : Gated<Geglu> {
  using Piece = OnePiece;

  template <class Real>
  CLOWDER_HD_INLINE Piece piece(Real, Real) const {
    return {};
  }

  // gelu'(g) = s + g s (1 - s) 2 z'(g) with s = sigmoid(2 z).
  template <class Real>
  CLOWDER_HD_INLINE GatedGradient<Real> gradient_on(const Piece&, Real g, Real u) const {
    constexpr Real kTwice = static_cast<Real>(1.5957691216057308);  // 2 sqrt(2/pi)
    constexpr Real kCubic = static_cast<Real>(0.044715);
    // Where |2 z| is above 300: s is 0 or 1 there, and powers of g cannot overflow.
    constexpr Real kFar = 16;
    Real t = g > kFar ? kFar : g;
    t = t < -kFar ? -kFar : t;
    const Real cubic = kCubic * t * t;
    const Real s = sigmoid(kTwice * t * (Real{1} + cubic));
    const Real slope = kTwice * (Real{1} + Real{3} * cubic);
    const Real gelu = g * s;
    return {gelu * u, (s + t * s * (Real{1} - s) * slope) * u, gelu};
  }
};

}  // namespace clowder

// The clamp of gated activations: g from above, u from both sides.
#pragma once

#include "model/activation/gated.h"

namespace clowder {

struct GatedClamp {
  // What is cut off. At the limit itself nothing is, so the derivative there is 1.
  struct Piece {
    bool gate_above;
    bool up_above;
    bool up_below;
    bool operator==(const Piece&) const = default;
  };

  float limit;  // > 0

  template <class Real>
  CLOWDER_HD_INLINE Piece piece(Real g, Real u) const {
    const Real most = static_cast<Real>(limit);
    return {g > most, u > most, u < -most};
  }

  // The gradient of f(clamp(g), clamp(u)).
  template <class Real, class F>
  CLOWDER_HD_INLINE GatedGradient<Real> gradient_on(const Piece& piece, Real g, Real u, const F& f) const {
    const Real most = static_cast<Real>(limit);
    const Real clamped_g = piece.gate_above ? most : g;
    const Real below = piece.up_above ? most : u;
    GatedGradient<Real> result = f.gradient(clamped_g, piece.up_below ? -most : below);
    result.dg = piece.gate_above ? Real{0} : result.dg;
    result.du = piece.up_above || piece.up_below ? Real{0} : result.du;
    return result;
  }
};

}  // namespace clowder

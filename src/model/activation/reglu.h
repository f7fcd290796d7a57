// ReGLU: f(g, u) = max(g, 0) * u (Shazeer 2020). The derivative of max(g, 0) at 0 is 0, as in PyTorch.
#pragma once

#include "model/activation/gated.h"

namespace clowder {

struct Reglu : Gated<Reglu> {
  struct Piece {
    bool is_off;
    bool operator==(const Piece&) const = default;
  };

  template <class Real>
  CLOWDER_HD_INLINE Piece piece(Real g, Real) const {
    return {g <= Real{0}};
  }

  template <class Real>
  CLOWDER_HD_INLINE GatedGradient<Real> gradient_on(const Piece& piece, Real g, Real u) const {
    const Real gate = piece.is_off ? Real{0} : g;
    return {gate * u, piece.is_off ? Real{0} : u, gate};
  }
};

}  // namespace clowder

// What every gated activation is: f(g, u) and its two derivatives, as functions of Real = float (the engines) or double
// (references and bounds). g and u are the values before any clamp. Each is a struct in a file of its own,
//
//   struct F : Gated<F> {
//     using Piece = ...;
//     template <class Real> Piece piece(Real g, Real u) const;
//     template <class Real> GatedGradient<Real> gradient_on(const Piece& piece, Real g, Real u) const;
//   };
//
// A piece is a region in which one smooth formula holds; an activation without corners has OnePiece. The two functions
// are apart because the fp64 reference takes the piece of g and u as engines see them, rounded to bf16, and the formula
// at the exact g and u.
//
// Functions are branch-free and CLOWDER_HD_INLINE, and made of own elementary functions (model/elementary.h). A NaN
// stays a NaN: comparisons are written so that it falls on a piece that passes it on.
#pragma once

#include "model/host_device.h"

namespace clowder {

template <class Real>
struct GatedGradient {
  Real value;  // f
  Real dg;     // df/dg
  Real du;     // df/du
};

struct OnePiece {
  bool operator==(const OnePiece&) const = default;
};

template <class F>
struct Gated {
  template <class Real>
  CLOWDER_HD_INLINE GatedGradient<Real> gradient(Real g, Real u) const {
    const F& f = static_cast<const F&>(*this);
    return f.gradient_on(f.piece(g, u), g, u);
  }

  template <class Real>
  CLOWDER_HD_INLINE Real value(Real g, Real u) const {
    return gradient(g, u).value;
  }
};

// Whether f has one formula over the square of points up to `reach` from (g, u) in either direction.
template <class F>
bool is_smooth_around(const F& f, double g, double u, double reach) {
  const auto piece = f.piece(g - reach, u - reach);
  return piece == f.piece(g - reach, u + reach) && piece == f.piece(g + reach, u - reach) &&
         piece == f.piece(g + reach, u + reach);
}

}  // namespace clowder

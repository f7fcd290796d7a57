// What every gated activation supplies: f(g, u) and its two derivatives, as functions of Real = float (the engines) or
// double (references and bounds). Each is a struct in a file of its own:
//
//   template <class Real> Real value(Real g, Real u) const;
//   template <class Real> GatedGradient<Real> gradient(Real g, Real u) const;
//
// Functions are branch-free and CLOWDER_HD_INLINE. g and u are the values before any clamp; a clamp's derivative at its
// limit is 1.
#pragma once

namespace clowder {

template <class Real>
struct GatedGradient {
  Real value;  // f
  Real dg;     // df/dg
  Real du;     // df/du
};

}  // namespace clowder

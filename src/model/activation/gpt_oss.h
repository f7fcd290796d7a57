// The gated activation of OpenAI's gpt-oss models (2025):
//
//   f(g, u) = (u' + 1) g' sigmoid(alpha g'),   g' = min(g, limit), u' = clamp(u, -limit, limit),
//
// with alpha = 1.702, for which g sigmoid(alpha g) is close to gelu(g), and a limit of 7.
#pragma once

#include "model/activation/clamp.h"
#include "model/elementary.h"

namespace clowder {

// Inside the limits.
struct GptOssUnclamped : Gated<GptOssUnclamped> {
  using Piece = OnePiece;

  template <class Real>
  CLOWDER_HD_INLINE Piece piece(Real, Real) const {
    return {};
  }

  // (g s)' = s + alpha g s (1 - s) with s = sigmoid(alpha g).
  template <class Real>
  CLOWDER_HD_INLINE GatedGradient<Real> gradient_on(const Piece&, Real g, Real u) const {
    constexpr Real kAlpha = static_cast<Real>(1.702);
    const Real s = sigmoid(kAlpha * g);
    const Real gate = g * s;
    const Real factor = u + Real{1};
    return {factor * gate, factor * (s + kAlpha * gate * (Real{1} - s)), gate};
  }
};

struct GptOss : Gated<GptOss> {
  using Piece = GatedClamp::Piece;

  template <class Real>
  CLOWDER_HD_INLINE Piece piece(Real g, Real u) const {
    return clamp().piece(g, u);
  }

  template <class Real>
  CLOWDER_HD_INLINE GatedGradient<Real> gradient_on(const Piece& piece, Real g, Real u) const {
    return clamp().gradient_on(piece, g, u, GptOssUnclamped{});
  }

 private:
  CLOWDER_HD_INLINE static GatedClamp clamp() { return {7.0f}; }
};

}  // namespace clowder

// How roundings of g, u and h, and of their gradients, show in what follows: moments of an activation over Gaussian g
// and u, by quadrature.
//
// Notation: a rounding multiplies a value by 1 + delta, where delta has mean 0 and variance c^2 (bounds.h) and is
// independent of everything else. A value's squared error is then a sum over the roundings on its way, and its ratio to
// the squared value, in units of c^2, is called a variance here.
#pragma once

#include "clowder/types.h"

namespace clowder::check {

// One set of values, all hidden values of a batch for example.
struct Propagation {
  // Mean squared error over mean square, in units of c^2.
  double variance = 0.0;
  // One value's worth for the relative error, in degrees of freedom: over n values, ||error|| / ||value|| spreads like the
  // root of an F variable with n * freedom degrees of freedom in both parts. 1 if error and value were independent Gaussians.
  double freedom = 0.0;
  // The same for ||error|| alone: it spreads like the root of a chi-squared variable.
  double error_freedom = 0.0;
};

struct Sensitivities {
  Propagation hidden;           // h: the roundings of g, u and h
  Propagation hidden_gradient;  // dg and du together: the roundings of g, u and of themselves
  double gate_variance = 0.0;   // of dg alone
  double up_variance = 0.0;     // of du alone
};

// g and u have mean 0 and standard deviation `scale`.
Sensitivities compute_sensitivities(const Activation& activation, double scale);

}  // namespace clowder::check

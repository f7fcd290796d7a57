// How roundings of g, u and h, and of their gradients, show in what follows: moments of an activation over Gaussian g
// and u, by quadrature.
//
// Notation: a rounding multiplies a value by 1 + delta, where delta has mean 0 and variance c^2 (bounds.h) and is
// independent of everything else. A value's squared error is then a sum over the roundings on its way, and its ratio to
// the squared value, in units of c^2, is called a variance here.
#pragma once

#include "clowder/types.h"

namespace clowder::check {

// Of a Gaussian: its fourth moment over its squared second one.
inline constexpr double kGaussianKurtosis = 3.0;

// One kind of values, all hidden values of a batch for example.
//
// Over n values, ||error|| / ||value|| spreads like the root of an F variable with n * freedom degrees of freedom in
// both parts; freedom is 1 for an error and a value that are independent Gaussians. ||error|| alone spreads like the
// root of a chi-squared variable with n * error_freedom degrees of freedom. `common` is the kurtosis of a factor that
// each value and its error share, independent from value to value.
struct Propagation {
  double variance = 0.0;        // mean squared error over mean square, in units of c^2
  double ratio_spread = 0.0;    // variance of ||error||^2 / ||value||^2 over n values, times n, over its mean's square
  double error_kurtosis = 0.0;  // mean of the fourth power of an error over its mean square's square

  double freedom(double common = 1.0) const { return 4.0 / (common * ratio_spread); }
  double error_freedom(double common = 1.0) const { return 2.0 / (common * error_kurtosis - 1.0); }
};

struct Sensitivities {
  Propagation hidden;           // h: the roundings of g, u and h
  Propagation hidden_gradient;  // dg and du together: the roundings of g, u and of themselves
  Propagation gate;             // dg alone
  Propagation up;               // du alone
  double gate_share = 0.0;      // of dg's mean square in that of dg and du together
  // Squared mean of h over its mean square. Roundings have no mean; the values of h that share one vary less freely.
  double hidden_mean_share = 0.0;
  // Of the mean square of h, the part where clamps hold g or u, and where they hold both.
  double partly_held_share = 0.0;
  double held_share = 0.0;
};

// g and u have mean 0 and standard deviation `scale`.
Sensitivities compute_sensitivities(const Activation& activation, double scale);

}  // namespace clowder::check

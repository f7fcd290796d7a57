// Bounds on how far an engine may be from the fp64 reference, derived from where the layer rounds.
//
// **One rounding.** Rounding to bf16 keeps 8 significant bits. A value with mantissa m in [1, 2) gets an error that is
// uniform over one unit in the last place, 2^-7 of the power of two below: its square is 2^-14 / 12 on average,
// relative to the value's square 2^-14 / (12 m^2). Values that spread over several octaves, Gaussian ones included,
// have mantissas that are uniform in their logarithm, where 1 / m^2 is 3 / (8 ln 2) = 0.541 on average. Hence the
// relative error of one rounding is c = 2^-7 sqrt(0.541 / 12) = 1.659e-3, whatever the scale.
//
// **A tensor.** Errors of different roundings are independent of each other and of the weights that values are
// multiplied with next, so a matrix product passes the relative error of its operand on, and squares of relative errors
// add up. In units of c^2, with S and S' the variances of h and of [dg, du] (sensitivity.h; 3.46 and 2.28 for SwiGLU of
// unit Gaussians):
//
//   out             S + 1 (y) + 1 (out)          dw2             S + 1 (wh), + 1 if it is bf16
//   dx              S' + 1 (dx of a slot) + 1    dw13            S', + 1 if it is bf16
//   dtopk_weights   S                            dshared_w2      S, + 1 if it is bf16
//   accumulated     share of the gradient in the sum's square * (that in fp32), + 1 if it is bf16
//
// A rounding that cannot err does not count: of a sum of one slot, or of a product with a power of two. The shared
// expert's contributions to out and dx are not rounded before the sum. A sum of two bf16 values of like size is a
// multiple of their unit q: where it needs rounding to 2 q, the error is q for every other sum, q^2 / 2 on average
// instead of (2 q)^2 / 12; where not, it is 0. Together that counts 7/6. fp32 sums of n terms add n * 2^-48.
//
// **Clamps and means.** Where a clamp holds g or u, h is a function of one bf16 value, and where it holds both, a
// constant: its mantissas do not spread, and a rounding of h or of w h may count up to 1 / 0.541. A constant's own
// rounding is known. Where h has a mean, as of gpt-oss's (u + 1), its part of out is the same for all tokens of an
// expert up to their weights, and its part of dw2 the same for all columns: fewer independent elements, below.
//
// **Chance.** ||error|| / ||reference|| over a part with few values strays from its mean. Let n count its independent
// contributions, as degrees of freedom: 1 + 2 / n = (1 + 2 / a) (1 + 2 / b) for a = hidden values * freedom
// (sensitivity.h), and b elements, each a sum of hidden values with random signs. The ratio's square spreads like an F
// variable with n degrees of freedom in both parts, for which Chernoff's inequality gives P(ratio > mean * r) <=
// cosh(ln r)^-n. Among N parts, none is above with probability 1 - p if
//
//   r = exp(acosh((N / p)^(1 / n))),
//
// about 1 + sqrt(2 ln(N / p) / n) where n is large, and without limit where n is small: a row of one element may be 0
// by chance. So rows are also judged by their error alone, relative to the typical row of their tensor or expert. The
// same inequality for a chi-squared variable bounds r^2 from above by the q > 1, and the typical row's square from
// below by the q < 1, that solve n / 2 (q - 1 - ln q) = ln(N / p).
#pragma once

#include "check/problem.h"

namespace clowder::check {

// c above.
double rounding_error();
// The square of a rounding's relative error, in units of c^2, where all mantissas are 1: 1 / 0.541.
double worst_rounding();

// Factors of the formulas above, for one part of `parts` with n degrees of freedom: r of a ratio, r of an error alone,
// and what a size may be below its mean.
double ratio_factor(double n, double parts);
double error_factor(double n, double parts);
double size_factor(double n, double parts);

struct TensorBounds {
  double expected = 0.0;  // of `rel`, without chance
  double rel = 0.0;
  double column_block = 0.0;
  double row = 0.0;
  double expert = 0.0;
  double row_error = 0.0;
};

struct LayerBounds {
  TensorBounds out;
  TensorBounds dx;
  TensorBounds dtopk_weights;
  TensorBounds dw13;
  TensorBounds dw2;
  TensorBounds dshared_w13;
  TensorBounds dshared_w2;
};

// For accumulated gradients: ||gradient||^2 / ||main_grad + gradient||^2 of the reference.
struct GradientShares {
  double w13 = 1.0;
  double w2 = 1.0;
  double shared_w13 = 1.0;
  double shared_w2 = 1.0;
};

LayerBounds compute_bounds(const Problem& problem, const GradientShares& shares);

}  // namespace clowder::check

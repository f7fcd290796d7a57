#include "check/sensitivity.h"

#include <cmath>
#include <initializer_list>
#include <vector>

#include "check/bounds.h"
#include "model/activation/dispatch.h"
#include "model/bf16.h"

namespace clowder::check {
namespace {

// Of a relative rounding error: a uniform error's 9/5, spread by mantissas m that are uniform in their logarithm:
// 9/5 E[m^-4] / E[m^-2]^2.
double rounding_kurtosis() {
  const double second = 3.0 / (8.0 * std::log(2.0));
  const double fourth = 15.0 / (64.0 * std::log(2.0));
  return 9.0 / 5.0 * fourth / (second * second);
}

// A sum of terms a_i delta_i, squared on average, and the same to the fourth power.
struct Error {
  double second = 0.0;
  double fourth = 0.0;

  static Error of(std::initializer_list<double> factors) {
    double squares = 0.0;
    double fourths = 0.0;
    for (const double a : factors) {
      squares += a * a;
      fourths += a * a * a * a;
    }
    return {squares, kGaussianKurtosis * squares * squares + (rounding_kurtosis() - kGaussianKurtosis) * fourths};
  }
};

// Weighted sums of squared values v and of the squared errors e of their roundings.
struct Moments {
  double total = 0.0;
  double v = 0.0;
  double vv = 0.0;
  double e = 0.0;
  double ee = 0.0;
  double ve = 0.0;

  void add(double weight, double value, const Error& error) {
    total += weight;
    v += weight * value;
    vv += weight * value * value;
    e += weight * error.second;
    ee += weight * error.fourth;
    ve += weight * value * error.second;
  }

  // With r = E[e] / E[v], the ratio of the sums over n values has the relative variance E[(e / r - v)^2] / (n E[v]^2)
  // to first order. An F variable with n degrees of freedom in both parts has 4 / n.
  Propagation propagation(double common) const {
    if (e == 0.0 || v == 0.0) return {0.0, 4.0, kGaussianKurtosis};
    const double r = e / v;
    return {r, common * total * (ee / (r * r) - 2.0 * ve / r + vv) / (v * v), common * total * ee / (e * e)};
  }
};

double square(double x) { return x * x; }

// Of g and u, in difference quotients.
constexpr double kStep = 1e-5;

// Second derivatives of the activation, from its first ones.
struct Curvature {
  double gg, gu, uu;
};

template <class F>
Curvature curvature(const F& activation, double g, double u) {
  const GatedGradient<double> above = activation.gradient(g + kStep, u);
  const GatedGradient<double> below = activation.gradient(g - kStep, u);
  const GatedGradient<double> right = activation.gradient(g, u + kStep);
  const GatedGradient<double> left = activation.gradient(g, u - kStep);
  return {(above.dg - below.dg) / (2 * kStep), (above.du - below.du) / (2 * kStep), (right.du - left.du) / (2 * kStep)};
}

// A point of a quadrature over one standard Gaussian.
struct Midpoint {
  double value;
  double weight;
};

// Midpoints of cells over 8 standard deviations either way. Cells are narrower towards 0, where a large scale squeezes
// what activations do, and end at corners: where piece_at(value) changes.
template <class PieceAt>
std::vector<Midpoint> midpoints(const PieceAt& piece_at) {
  constexpr int kCells = 300;
  constexpr double kReach = 8.0;
  std::vector<Midpoint> points;
  const auto add_cell = [&](double low, double high) {
    const double value = 0.5 * (low + high);
    points.push_back({value, std::exp(-0.5 * value * value) * (high - low)});
  };
  const auto edge = [&](int i) {
    const double t = 2.0 * i / kCells - 1.0;
    return kReach * t * t * t;
  };
  for (int i = 0; i < kCells; ++i) {
    const double low = edge(i);
    const double high = edge(i + 1);
    if (piece_at(low) == piece_at(high)) {
      add_cell(low, high);
      continue;
    }
    double below = low;
    double above = high;
    for (int step = 0; step < 50; ++step) {
      const double middle = 0.5 * (below + above);
      (piece_at(middle) == piece_at(low) ? below : above) = middle;
    }
    add_cell(low, below);
    add_cell(above, high);
  }
  return points;
}

// How many of g and u clamps hold where they are: h does not vary with them.
template <class Real>
int num_held(const GatedGradient<Real>& f) {
  return (f.dg == 0.0 ? 1 : 0) + (f.du == 0.0 ? 1 : 0);
}

// The roundings of g, u and h in h. Where both g and u are held, h has one value, and only its own rounding errs,
// always alike. Where one is, h is a function of one bf16 value, so its mantissas need not spread: at worst all are
// near 1.
Error hidden_error(const GatedGradient<double>& f, double g, double u) {
  const int held = num_held(f);
  if (held < 2) return Error::of({g * f.dg, u * f.du, f.value * std::sqrt(held == 1 ? worst_rounding() : 1.0)});
  const double rounded = static_cast<double>(to_float(to_bf16(static_cast<float>(f.value))));
  const double squared = square((rounded - f.value) / rounding_error());
  return {squared, squared * squared};
}

}  // namespace

Sensitivities compute_sensitivities(const Activation& kind, double scale) {
  Moments hidden, gradient, gate, up;
  double mean = 0.0;
  double held[3] = {};  // squares of h by how many of g and u are
  with_activation(kind, [&](const auto& activation) {
    for (const Midpoint& a : midpoints([&](double g) { return activation.piece(scale * g, 0.0); })) {
      for (const Midpoint& b : midpoints([&](double u) { return activation.piece(0.0, scale * u); })) {
        const double g = scale * a.value;
        const double u = scale * b.value;
        // Masks are those of the reference, so no error jumps: a difference across a corner says nothing.
        if (!is_smooth_around(activation, g, u, kStep)) continue;
        const double weight = a.weight * b.weight;
        const GatedGradient<double> f = activation.gradient(g, u);
        const Curvature second = curvature(activation, g, u);
        const Error gate_error = Error::of({g * second.gg, u * second.gu, f.dg});
        const Error up_error = Error::of({g * second.gu, u * second.uu, f.du});
        const Error both{gate_error.second + up_error.second,
                         gate_error.fourth + up_error.fourth + 2.0 * gate_error.second * up_error.second};
        mean += weight * f.value;
        held[num_held(f)] += weight * square(f.value);
        hidden.add(weight, square(f.value), hidden_error(f, g, u));
        gate.add(weight, square(f.dg), gate_error);
        up.add(weight, square(f.du), up_error);
        gradient.add(weight, square(f.dg) + square(f.du), both);
      }
    }
  });
  Sensitivities result;
  result.hidden = hidden.propagation(1.0);
  result.hidden_gradient = gradient.propagation(kGaussianKurtosis);  // of dh
  result.gate = gate.propagation(kGaussianKurtosis);
  result.up = up.propagation(kGaussianKurtosis);
  result.gate_share = gradient.v > 0.0 ? gate.v / gradient.v : 0.0;
  result.partly_held_share = hidden.v > 0.0 ? (held[1] + held[2]) / hidden.v : 0.0;
  result.held_share = hidden.v > 0.0 ? held[2] / hidden.v : 0.0;
  result.hidden_mean_share = hidden.v > 0.0 ? square(mean) / (hidden.total * hidden.v) : 0.0;
  return result;
}

}  // namespace clowder::check

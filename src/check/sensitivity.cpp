#include "check/sensitivity.h"

#include <cmath>
#include <initializer_list>

#include "model/activation/dispatch.h"

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
    const double r = e / v;
    return {r, common * total * (ee / (r * r) - 2.0 * ve / r + vv) / (v * v), common * total * ee / (e * e)};
  }
};

double square(double x) { return x * x; }

// Second derivatives of the activation, from its first ones.
struct Curvature {
  double gg, gu, uu;
};

template <class F>
Curvature curvature(const F& activation, double g, double u) {
  constexpr double kStep = 1e-5;
  const GatedGradient<double> above = activation.gradient(g + kStep, u);
  const GatedGradient<double> below = activation.gradient(g - kStep, u);
  const GatedGradient<double> right = activation.gradient(g, u + kStep);
  const GatedGradient<double> left = activation.gradient(g, u - kStep);
  return {(above.dg - below.dg) / (2 * kStep), (above.du - below.du) / (2 * kStep), (right.du - left.du) / (2 * kStep)};
}

// A clamp's derivative jumps at its limit. Masks are those of the reference, so no error jumps: a difference across the
// limit says nothing.
bool straddles_limit(const Activation& activation, double g, double u) {
  constexpr double kNear = 1e-4;
  if (activation.kind != ActivationKind::kSwigluClamp) return false;
  const double limit = static_cast<double>(activation.limit);
  return std::abs(g - limit) < kNear || std::abs(std::abs(u) - limit) < kNear;
}

}  // namespace

Sensitivities compute_sensitivities(const Activation& kind, double scale) {
  // Midpoints over 8 standard deviations either way.
  constexpr int kPoints = 300;
  constexpr double kReach = 8.0;
  Moments hidden, gradient, gate, up;
  with_activation(kind, [&](const auto& activation) {
    for (int i = 0; i < kPoints; ++i) {
      for (int j = 0; j < kPoints; ++j) {
        const double a = kReach * (2.0 * i + 1.0 - kPoints) / kPoints;
        const double b = kReach * (2.0 * j + 1.0 - kPoints) / kPoints;
        const double g = scale * a;
        const double u = scale * b;
        if (straddles_limit(kind, g, u)) continue;
        const double weight = std::exp(-0.5 * (a * a + b * b));
        const GatedGradient<double> f = activation.gradient(g, u);
        const Curvature second = curvature(activation, g, u);
        const Error value_error = Error::of({g * f.dg, u * f.du, f.value});
        const Error gate_error = Error::of({g * second.gg, u * second.gu, f.dg});
        const Error up_error = Error::of({g * second.gu, u * second.uu, f.du});
        const Error both{gate_error.second + up_error.second,
                         gate_error.fourth + up_error.fourth + 2.0 * gate_error.second * up_error.second};
        hidden.add(weight, square(f.value), value_error);
        gate.add(weight, square(f.dg), gate_error);
        up.add(weight, square(f.du), up_error);
        gradient.add(weight, square(f.dg) + square(f.du), both);
      }
    }
  });
  Sensitivities result;
  result.hidden = hidden.propagation(1.0);
  result.hidden_gradient = gradient.propagation(kGaussianKurtosis);  // of dh
  result.gate_variance = gate.propagation(1.0).variance;
  result.up_variance = up.propagation(1.0).variance;
  return result;
}

}  // namespace clowder::check

#include "check/report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>

#include "model/bf16.h"

namespace clowder::check {
namespace {

// Ranks' gradients of a shared expert all start as the main gradient.
double share_of_gradient(std::vector<double>& gradient, const std::vector<float>& main, double times) {
  if (main.empty()) return 1.0;
  double alone = 0.0;
  double sum = 0.0;
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    alone += gradient[i] * gradient[i];
    gradient[i] += times * static_cast<double>(main[i]);
    sum += gradient[i] * gradient[i];
  }
  return sum > 0.0 ? alone / sum : 1.0;
}

GradientShares add_main_gradients(const Problem& problem, ReferenceResults& reference) {
  const double ranks = problem.spec.num_ranks();
  GradientShares shares;
  shares.w13 = share_of_gradient(reference.dw13, problem.main_w13, 1.0);
  shares.w2 = share_of_gradient(reference.dw2, problem.main_w2, 1.0);
  shares.shared_w13 = share_of_gradient(reference.dshared_w13, problem.main_shared_w13, ranks);
  shares.shared_w2 = share_of_gradient(reference.dshared_w2, problem.main_shared_w2, ranks);
  return shares;
}

// Takes each open choice as the engine took it, by what its row of dw13 shows of the token's x: as one of both sides,
// whichever is nearer, so that anything else is still an error.
void settle_choices(const Problem& problem, const LayerTensors& tensors, ReferenceResults& reference) {
  const LayerShape& shape = problem.shape;
  const std::int64_t hidden = shape.hidden;
  std::vector<double> x(static_cast<std::size_t>(hidden));
  for (const OpenChoice& choice : reference.choices) {
    const bool is_shared = choice.expert < 0;
    const std::int64_t row = (is_shared ? 0 : choice.expert * 2 * shape.intermediate) + choice.output;
    std::vector<double>& gradient = is_shared ? reference.dshared_w13 : reference.dw13;
    const std::vector<float>& actual = is_shared ? tensors.dshared_w13 : tensors.dw13;
    const std::vector<bf16>& w13 = is_shared ? problem.shared_w13 : problem.w13;
    double along = 0.0;
    double size = 0.0;
    for (std::int64_t j = 0; j < hidden; ++j) {
      x[j] = static_cast<double>(to_float(problem.x[choice.token * hidden + j]));
      along += x[j] * (static_cast<double>(actual[row * hidden + j]) - gradient[row * hidden + j]);
      size += x[j] * x[j];
    }
    const double d = choice.difference;
    if (!(along * d > 0.5 * d * d * size)) continue;
    for (std::int64_t j = 0; j < hidden; ++j) {
      gradient[row * hidden + j] += d * x[j];
      reference.dx[choice.token * hidden + j] += d * static_cast<double>(to_float(w13[row * hidden + j]));
    }
  }
}

std::string digest_as(bool is_bf16_tensor, const std::vector<float>& values) {
  if (!is_bf16_tensor) return digest(std::span<const float>(values));
  std::vector<bf16> rounded(values.size());
  std::transform(values.begin(), values.end(), rounded.begin(), [](float value) { return to_bf16(value); });
  return digest(std::span<const bf16>(rounded));
}

bool within(double error, double bound) { return std::isfinite(error) && error <= bound; }

double finite(double value) { return std::isfinite(value) ? value : std::numeric_limits<double>::max(); }

nlohmann::ordered_json tensor_json(const TensorReport& tensor) {
  nlohmann::ordered_json json = {
      {"rel", finite(tensor.errors.rel)},
      {"rel_worst_column_block", finite(tensor.errors.rel_worst_column_block)},
      {"rel_worst_row", finite(tensor.errors.rel_worst_row)},
      {"worst_row_error", finite(tensor.errors.worst_row_error)},
      {"bound", finite(tensor.bounds.rel)},
      {"bound_worst_column_block", finite(tensor.bounds.column_block)},
      {"bound_worst_row", finite(tensor.bounds.row)},
      {"bound_worst_row_error", finite(tensor.bounds.row_error)},
  };
  if (tensor.has_experts) {
    json["rel_worst_expert"] = finite(tensor.errors.rel_worst_expert);
    json["bound_worst_expert"] = finite(tensor.bounds.expert);
  }
  json["digest"] = tensor.digest;
  json["ok"] = tensor.ok();
  return json;
}

std::string measure(double error, double bound) {
  char text[64];
  std::snprintf(text, sizeof text, "%9.2e /%8.1e", error, bound);
  return text;
}

}  // namespace

bool TensorReport::ok() const {
  return within(errors.rel, bounds.rel) && within(errors.rel_worst_column_block, bounds.column_block) &&
         within(errors.rel_worst_row, bounds.row) && within(errors.worst_row_error, bounds.row_error) &&
         (!has_experts || within(errors.rel_worst_expert, bounds.expert));
}

ReferenceResults compute_reference(const Problem& problem, int threads) {
  ReferenceInputs inputs;
  inputs.shape = problem.shape;
  inputs.x = problem.x;
  inputs.topk_idx = problem.topk_idx;
  inputs.topk_weights = problem.topk_weights;
  inputs.w13 = problem.w13;
  inputs.w2 = problem.w2;
  inputs.shared_w13 = problem.shared_w13;
  inputs.shared_w2 = problem.shared_w2;
  inputs.dout = problem.dout;
  inputs.forward_only = problem.spec.forward_only;
  return compute_reference(inputs, threads);
}

std::vector<TensorReport> judge(const Problem& problem, const LayerTensors& tensors, ReferenceResults& reference) {
  const LayerShape& shape = problem.shape;
  const LayerBounds bounds = compute_bounds(problem, add_main_gradients(problem, reference));
  if (tensors.dw13.size() == reference.dw13.size() && tensors.dshared_w13.size() == reference.dshared_w13.size())
    settle_choices(problem, tensors, reference);
  const bool bf16_gradients = is_bf16(problem.spec.gradient_mode);
  std::vector<TensorReport> reports;
  const auto add = [&](const char* name, const TensorShape& matrix, const std::vector<float>& actual,
                       const std::vector<double>& expected, const TensorBounds& bound, bool is_bf16_tensor) {
    const auto elements = static_cast<std::size_t>(matrix.elements());
    if (actual.size() != elements || expected.size() != elements) {
      throw Error(ErrorCode::kInternal, std::string(name) + ": the engine or the reference has another size");
    }
    reports.push_back(
        {name, matrix.groups > 1, compare(actual, expected, matrix), bound, digest_as(is_bf16_tensor, actual)});
  };

  const TensorShape token_matrix{1, problem.tokens(), shape.hidden};
  add("out", token_matrix, tensors.out, reference.out, bounds.out, true);
  if (problem.spec.forward_only) return reports;
  add("dx", token_matrix, tensors.dx, reference.dx, bounds.dx, true);
  add("dtopk_weights", {1, problem.tokens(), shape.topk}, tensors.dtopk_weights, reference.dtopk_weights,
      bounds.dtopk_weights, false);
  add("dw13", {shape.num_experts, 2 * shape.intermediate, shape.hidden}, tensors.dw13, reference.dw13, bounds.dw13,
      bf16_gradients);
  add("dw2", {shape.num_experts, shape.hidden, shape.intermediate}, tensors.dw2, reference.dw2, bounds.dw2,
      bf16_gradients);
  reports[3].has_experts = reports[4].has_experts = true;
  if (shape.shared_intermediate == 0) return reports;
  add("dshared_w13", {1, 2 * shape.shared_intermediate, shape.hidden}, tensors.dshared_w13, reference.dshared_w13,
      bounds.dshared_w13, bf16_gradients);
  add("dshared_w2", {1, shape.hidden, shape.shared_intermediate}, tensors.dshared_w2, reference.dshared_w2,
      bounds.dshared_w2, bf16_gradients);
  return reports;
}

bool Report::ok() const {
  const bool tensors_ok = std::all_of(tensors.begin(), tensors.end(), [](const TensorReport& t) { return t.ok(); });
  return tensors_ok && repeats_identical && skipped_ids == expected_skipped_ids;
}

std::string to_json(const Report& report) {
  nlohmann::ordered_json json = {
      {"ok", report.ok()},
      {"engine", report.engine},
      {"skipped_ids", report.skipped_ids},
      {"repeats_identical", report.repeats_identical},
      {"seconds", report.seconds},
      {"tensors", nlohmann::ordered_json::object()},
  };
  for (const TensorReport& tensor : report.tensors) json["tensors"][tensor.name] = tensor_json(tensor);
  return json.dump();
}

std::string to_text(const Report& report) {
  std::string text = "relative error / bound\n";
  char line[256];
  const auto add_line = [&](const char* name, const char* all, const char* columns, const char* row,
                            const char* row_error, const char* expert, const char* verdict) {
    std::snprintf(line, sizeof line, "%-14s%-21s%-21s%-21s%-21s%-21s%s\n", name, all, columns, row, row_error, expert,
                  verdict);
    text += line;
  };
  add_line("tensor", "all", "worst 16 columns", "worst row", "worst row's error", "worst expert", "");
  for (const TensorReport& tensor : report.tensors) {
    const Comparison& errors = tensor.errors;
    const TensorBounds& bounds = tensor.bounds;
    add_line(
        tensor.name.c_str(), measure(errors.rel, bounds.rel).c_str(),
        measure(errors.rel_worst_column_block, bounds.column_block).c_str(),
        measure(errors.rel_worst_row, bounds.row).c_str(), measure(errors.worst_row_error, bounds.row_error).c_str(),
        tensor.has_experts ? measure(errors.rel_worst_expert, bounds.expert).c_str() : "", tensor.ok() ? "OK" : "FAIL");
  }
  std::snprintf(line, sizeof line, "skipped ids %lld of %lld expected, repeats %s, engine %s, %.3f s a step: %s\n",
                static_cast<long long>(report.skipped_ids), static_cast<long long>(report.expected_skipped_ids),
                report.repeats_identical ? "identical" : "DIFFERENT", report.engine.c_str(), report.seconds,
                report.ok() ? "OK" : "FAIL");
  return text + line;
}

}  // namespace clowder::check

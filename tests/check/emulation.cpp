#include "emulation.h"

#include "model/activation/dispatch.h"
#include "model/bf16.h"
#include "model/matrix_product.h"

namespace clowder::check {
namespace {

using Matrix = std::vector<double>;

double rounded(double value) { return static_cast<double>(to_float(to_bf16(static_cast<float>(value)))); }
void round_all(Matrix& matrix) {
  for (double& value : matrix) value = rounded(value);
}

struct Rows {
  std::vector<std::int64_t> tokens;
  std::vector<std::int64_t> slots;  // -1 for the shared expert
  std::vector<double> weights;

  std::int64_t count() const { return static_cast<std::int64_t>(tokens.size()); }
};

class Emulation {
 public:
  Emulation(const Problem& problem, int threads) : problem_(problem), threads_(threads) {}

  LayerTensors run() {
    const LayerShape& shape = problem_.shape;
    const std::int64_t expert_size = shape.intermediate * shape.hidden;
    out_.assign(problem_.x.size(), 0.0);
    dx_.assign(problem_.x.size(), 0.0);
    if (!problem_.spec.forward_only) tensors_.dtopk_weights.assign(problem_.topk_idx.size(), 0.0f);
    if (shape.shared_intermediate > 0) run_shared();
    for (std::int32_t e = 0; e < shape.num_experts; ++e) {
      const Gradients gradients = run_expert(routed_rows(e), problem_.w13.data() + 2 * e * expert_size,
                                             problem_.w2.data() + e * expert_size, shape.intermediate);
      store(gradients.w13, problem_.main_w13, 2 * e * expert_size, tensors_.dw13);
      store(gradients.w2, problem_.main_w2, e * expert_size, tensors_.dw2);
    }
    finish(out_, tensors_.out);
    if (!problem_.spec.forward_only) finish(dx_, tensors_.dx);
    return std::move(tensors_);
  }

 private:
  struct Gradients {
    Matrix w13, w2;
  };

  static void finish(const Matrix& sums, std::vector<float>& target) {
    for (const double sum : sums) target.push_back(static_cast<float>(rounded(sum)));
  }

  void store(const Matrix& gradient, const std::vector<float>& main, std::int64_t offset, std::vector<float>& target) {
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      const float before = main.empty() ? 0.0f : main[static_cast<std::size_t>(offset) + i];
      const float sum = static_cast<float>(gradient[i]) + before;
      target.push_back(is_bf16(problem_.spec.gradient_mode) ? to_float(to_bf16(sum)) : sum);
    }
  }

  Rows routed_rows(std::int32_t expert) const {
    Rows rows;
    for (std::size_t slot = 0; slot < problem_.topk_idx.size(); ++slot) {
      if (problem_.topk_idx[slot] != expert) continue;
      rows.tokens.push_back(static_cast<std::int64_t>(slot) / problem_.shape.topk);
      rows.slots.push_back(static_cast<std::int64_t>(slot));
      rows.weights.push_back(static_cast<double>(problem_.topk_weights[slot]));
    }
    return rows;
  }

  // Each rank's gradients are stored by themselves, then added in fp32.
  void run_shared() {
    std::vector<float> sum_w13, sum_w2;
    std::int64_t first = 0;
    for (const std::int64_t count : problem_.spec.tokens_per_rank) {
      Rows rows;
      for (std::int64_t token = first; token < first + count; ++token) {
        rows.tokens.push_back(token);
        rows.slots.push_back(-1);
        rows.weights.push_back(1.0);
      }
      first += count;
      const Gradients gradients =
          run_expert(rows, problem_.shared_w13.data(), problem_.shared_w2.data(), problem_.shape.shared_intermediate);
      add_rank(gradients.w13, problem_.main_shared_w13, sum_w13);
      add_rank(gradients.w2, problem_.main_shared_w2, sum_w2);
    }
    for (const float value : sum_w13) tensors_.dshared_w13.push_back(as_gradient(value));
    for (const float value : sum_w2) tensors_.dshared_w2.push_back(as_gradient(value));
  }

  float as_gradient(float value) const {
    return is_bf16(problem_.spec.gradient_mode) ? to_float(to_bf16(value)) : value;
  }

  void add_rank(const Matrix& gradient, const std::vector<float>& main, std::vector<float>& sum) {
    std::vector<float> stored;
    store(gradient, main, 0, stored);
    sum.resize(stored.size());
    for (std::size_t i = 0; i < stored.size(); ++i) sum[i] += stored[i];
  }

  Matrix gather(const std::vector<bf16>& tensor, const Rows& rows) const {
    Matrix matrix;
    for (const std::int64_t token : rows.tokens) {
      for (std::int64_t j = 0; j < problem_.shape.hidden; ++j) {
        matrix.push_back(
            static_cast<double>(to_float(tensor[static_cast<std::size_t>(token * problem_.shape.hidden + j)])));
      }
    }
    return matrix;
  }

  void scatter(const Matrix& rows_values, const Rows& rows, bool weighted, Matrix& sums) const {
    const std::int64_t hidden = problem_.shape.hidden;
    for (std::int64_t r = 0; r < rows.count(); ++r) {
      const bool is_shared = rows.slots[r] < 0;
      for (std::int64_t j = 0; j < hidden; ++j) {
        const double value = rows_values[r * hidden + j];
        sums[rows.tokens[r] * hidden + j] += (weighted ? rows.weights[r] : 1.0) * (is_shared ? value : rounded(value));
      }
    }
  }

  Gradients run_expert(const Rows& rows, const bf16* w13, const bf16* w2, std::int64_t width) {
    const std::int64_t hidden = problem_.shape.hidden;
    const std::int64_t count = rows.count();
    const auto w1_view = row_major(w13, hidden);
    const auto w3_view = row_major(w13 + width * hidden, hidden);
    const auto w2_view = row_major(w2, width);
    const Matrix x = gather(problem_.x, rows);
    Matrix g(count * width), u(count * width), h(count * width), y(count * hidden);
    multiply_add({count, width, hidden}, row_major(x.data(), hidden), w1_view.transposed(), g.data(), threads_);
    multiply_add({count, width, hidden}, row_major(x.data(), hidden), w3_view.transposed(), u.data(), threads_);
    round_all(g);
    round_all(u);
    with_activation(problem_.shape.activation, [&](const auto& activation) {
      for (std::size_t i = 0; i < h.size(); ++i) h[i] = rounded(activation.value(g[i], u[i]));
    });
    multiply_add({count, hidden, width}, row_major(h.data(), width), w2_view.transposed(), y.data(), threads_);
    scatter(y, rows, true, out_);
    Gradients gradients;
    if (problem_.spec.forward_only) return gradients;

    const Matrix dy = gather(problem_.dout, rows);
    Matrix dh(count * width), dx(count * hidden);
    multiply_add({count, width, hidden}, row_major(dy.data(), hidden), w2_view, dh.data(), threads_);
    with_activation(problem_.shape.activation, [&](const auto& activation) {
      for (std::int64_t r = 0; r < count; ++r) {
        double dw = 0.0;
        for (std::int64_t i = r * width; i < (r + 1) * width; ++i) {
          const auto f = activation.gradient(g[i], u[i]);
          const double weighted = rows.weights[r] * dh[i];
          dw += dh[i] * h[i];
          g[i] = rounded(weighted * f.dg);
          u[i] = rounded(weighted * f.du);
          h[i] = rounded(rows.weights[r] * h[i]);
        }
        if (rows.slots[r] >= 0) tensors_.dtopk_weights[rows.slots[r]] = static_cast<float>(dw);
      }
    });
    const auto dg = row_major(g.data(), width);
    const auto du = row_major(u.data(), width);
    multiply_add({count, hidden, width}, dg, w1_view, dx.data(), threads_);
    multiply_add({count, hidden, width}, du, w3_view, dx.data(), threads_);
    scatter(dx, rows, false, dx_);
    gradients.w13.resize(2 * width * hidden);
    gradients.w2.resize(width * hidden);
    const auto x_view = row_major(x.data(), hidden);
    multiply_add({width, hidden, count}, dg.transposed(), x_view, gradients.w13.data(), threads_);
    multiply_add({width, hidden, count}, du.transposed(), x_view, gradients.w13.data() + width * hidden, threads_);
    multiply_add({hidden, width, count}, row_major(dy.data(), hidden).transposed(), row_major(h.data(), width),
                 gradients.w2.data(), threads_);
    return gradients;
  }

  const Problem& problem_;
  int threads_;
  Matrix out_, dx_;
  LayerTensors tensors_;
};

}  // namespace

LayerTensors emulate_engine(const Problem& problem, int threads) { return Emulation(problem, threads).run(); }

}  // namespace clowder::check

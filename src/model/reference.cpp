#include "model/reference.h"

#include <cmath>
#include <type_traits>

#include "model/activation/dispatch.h"
#include "model/bf16.h"
#include "model/matrix_product.h"
#include "model/parallel.h"

namespace clowder {
namespace {

using Matrix = std::vector<double>;

Matrix make_matrix(std::int64_t rows, std::int64_t columns) {
  return Matrix(static_cast<std::size_t>(rows * columns), 0.0);
}

double round_to_bf16(double value) { return static_cast<double>(to_float(to_bf16(static_cast<float>(value)))); }

// Where the bf16 value is clamped, so is the exact one, and nowhere else.
template <class F>
GatedGradient<double> masked_gradient(const F& activation, double g, double u) {
  return activation.gradient_on(activation.piece(round_to_bf16(g), round_to_bf16(u)), g, u);
}

// How far a sum of `terms` products in fp32, of typical size `size`, may be from the exact one: `terms` roundings of
// partial sums of its own size. Roundings have random signs, so this is many times what they add up to.
double sum_error(std::int64_t terms, double size) { return 0x1p-24 * static_cast<double>(terms) * size; }

double root_mean_square(const double* values, std::int64_t count) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < count; ++i) sum += values[i] * values[i];
  return std::sqrt(sum / static_cast<double>(count));
}

// What f has on the other side of a corner that g, or u, may be on within `reach`: that derivative less this one; 0
// where there is no such corner.
template <class F>
struct OtherSide {
  const F& f;
  double g, u;

  double gate(double reach) const {
    return difference(g - reach, u, g + reach, u, [](const auto& gradient) { return gradient.dg; });
  }
  double up(double reach) const {
    return difference(g, u - reach, g, u + reach, [](const auto& gradient) { return gradient.du; });
  }

 private:
  template <class Part>
  double difference(double low_g, double low_u, double high_g, double high_u, const Part& part) const {
    const auto piece_at = [&](double a, double b) { return f.piece(round_to_bf16(a), round_to_bf16(b)); };
    const auto here = piece_at(g, u);
    const auto low = piece_at(low_g, low_u);
    const auto high = piece_at(high_g, high_u);
    if (low == here && high == here) return 0.0;
    return part(f.gradient_on(low == here ? high : low, g, u)) - part(f.gradient_on(here, g, u));
  }
};

// One expert's two matrices.
struct ExpertView {
  std::int32_t index;  // -1: the shared expert
  const bf16* w13;
  const bf16* w2;
  std::int64_t intermediate;
};

// A row of an expert: the global token, its slot, and the slot's weight. A shared expert's rows have slot -1 and
// weight 1.
struct Row {
  std::int64_t token;
  std::int64_t slot;
  double weight;
};

class Reference {
 public:
  Reference(const ReferenceInputs& inputs, int threads)
      : inputs_(inputs), threads_(threads), hidden_(inputs.shape.hidden), topk_(inputs.shape.topk) {
    const LayerShape& shape = inputs.shape;
    tokens_ = static_cast<std::int64_t>(inputs.topk_idx.size()) / topk_;
    results_.out = make_matrix(tokens_, hidden_);
    if (!has_backward()) return;
    results_.dx = make_matrix(tokens_, hidden_);
    results_.dtopk_weights = make_matrix(tokens_, topk_);
    results_.dw13 = make_matrix(shape.num_experts, 2 * shape.intermediate * hidden_);
    results_.dw2 = make_matrix(shape.num_experts, shape.intermediate * hidden_);
    results_.dshared_w13 = make_matrix(2 * shape.shared_intermediate, hidden_);
    results_.dshared_w2 = make_matrix(shape.shared_intermediate, hidden_);
  }

  ReferenceResults run() {
    const std::int64_t intermediate = inputs_.shape.intermediate;
    const std::vector<std::vector<Row>> rows = rows_of_experts();
    for (std::int32_t e = 0; e < inputs_.shape.num_experts; ++e) {
      const std::int64_t size = e * intermediate * hidden_;
      const ExpertView expert{e, inputs_.w13.data() + 2 * size, inputs_.w2.data() + size, intermediate};
      run_expert(expert, rows[static_cast<std::size_t>(e)], results_.dw13.data() + 2 * size,
                 results_.dw2.data() + size);
    }
    if (inputs_.shape.shared_intermediate > 0) run_shared_expert();
    return std::move(results_);
  }

 private:
  bool has_backward() const { return !inputs_.forward_only; }

  std::vector<std::vector<Row>> rows_of_experts() const {
    std::vector<std::vector<Row>> rows(static_cast<std::size_t>(inputs_.shape.num_experts));
    for (std::int64_t slot = 0; slot < tokens_ * topk_; ++slot) {
      const std::int32_t id = inputs_.topk_idx[static_cast<std::size_t>(slot)];
      if (id < 0 || id >= inputs_.shape.num_experts) continue;
      const double weight = static_cast<double>(inputs_.topk_weights[static_cast<std::size_t>(slot)]);
      rows[static_cast<std::size_t>(id)].push_back({slot / topk_, slot, weight});
    }
    return rows;
  }

  void run_shared_expert() {
    std::vector<Row> rows;
    for (std::int64_t token = 0; token < tokens_; ++token) rows.push_back({token, -1, 1.0});
    const ExpertView expert{-1, inputs_.shared_w13.data(), inputs_.shared_w2.data(), inputs_.shape.shared_intermediate};
    run_expert(expert, rows, results_.dshared_w13.data(), results_.dshared_w2.data());
  }

  Matrix gather(std::span<const bf16> tensor, const std::vector<Row>& rows) const {
    Matrix gathered = make_matrix(static_cast<std::int64_t>(rows.size()), hidden_);
    double* target = gathered.data();
    for (const Row& row : rows) {
      const bf16* source = tensor.data() + row.token * hidden_;
      for (std::int64_t j = 0; j < hidden_; ++j) *target++ = static_cast<double>(to_float(source[j]));
    }
    return gathered;
  }

  // target[token] += scale(row) * source[row]
  template <class Scale>
  void scatter_add(const Matrix& source, const std::vector<Row>& rows, Matrix& target, const Scale& scale) const {
    const double* from = source.data();
    for (const Row& row : rows) {
      double* to = target.data() + row.token * hidden_;
      const double factor = scale(row);
      for (std::int64_t j = 0; j < hidden_; ++j) to[j] += factor * *from++;
    }
  }

  // What the activation makes of one expert's rows, each [rows, I].
  struct Hidden {
    Matrix h, dg, du;
    std::vector<std::vector<OpenChoice>> choices;  // of each row
  };

  Hidden activate(const ExpertView& expert, const Matrix& x, std::int64_t rows) const {
    const std::int64_t width = expert.intermediate;
    Hidden hidden{make_matrix(rows, width), make_matrix(rows, width), make_matrix(rows, width), {}};
    hidden.choices.resize(static_cast<std::size_t>(rows));
    const ProductShape product{rows, width, hidden_};
    const auto x_view = row_major(x.data(), hidden_);
    const bf16* w3 = expert.w13 + width * hidden_;
    multiply_add(product, x_view, row_major(expert.w13, hidden_).transposed(), hidden.dg.data(), threads_);
    multiply_add(product, x_view, row_major(w3, hidden_).transposed(), hidden.du.data(), threads_);
    with_activation(inputs_.shape.activation, [&](const auto& activation) {
      parallel_for(rows, threads_, [&](std::int64_t row) {
        if (has_backward())
          hidden.choices[static_cast<std::size_t>(row)] = find_choices(activation, hidden, row, width);
        for (std::int64_t i = row * width; i < (row + 1) * width; ++i) {
          const auto index = static_cast<std::size_t>(i);
          const GatedGradient<double> f = masked_gradient(activation, hidden.dg[index], hidden.du[index]);
          hidden.h[index] = f.value;
          hidden.dg[index] = f.dg;
          hidden.du[index] = f.du;
        }
      });
    });
    return hidden;
  }

  // Before g and u of the row, in hidden.dg and hidden.du, are replaced.
  template <class F>
  std::vector<OpenChoice> find_choices(const F& activation, const Hidden& hidden, std::int64_t row,
                                       std::int64_t width) const {
    std::vector<OpenChoice> choices;
    if constexpr (!std::is_same_v<typename F::Piece, OnePiece>) {
      const double* g = hidden.dg.data() + row * width;
      const double* u = hidden.du.data() + row * width;
      const double reach_g = sum_error(hidden_, root_mean_square(g, width));
      const double reach_u = sum_error(hidden_, root_mean_square(u, width));
      for (std::int64_t i = 0; i < width; ++i) {
        const OtherSide<F> other{activation, g[i], u[i]};
        if (const double d = other.gate(reach_g); d != 0.0) choices.push_back({0, 0, i, d});
        if (const double d = other.up(reach_u); d != 0.0) choices.push_back({0, 0, width + i, d});
      }
    }
    return choices;
  }

  void run_expert(const ExpertView& expert, const std::vector<Row>& rows, double* dw13, double* dw2) {
    const auto count = static_cast<std::int64_t>(rows.size());
    if (count == 0) return;
    const Matrix x = gather(inputs_.x, rows);
    Hidden hidden = activate(expert, x, count);
    Matrix y = make_matrix(count, hidden_);
    const std::int64_t width = expert.intermediate;
    multiply_add({count, hidden_, width}, row_major(hidden.h.data(), width), row_major(expert.w2, width).transposed(),
                 y.data(), threads_);
    scatter_add(y, rows, results_.out, [](const Row& row) { return row.weight; });
    if (has_backward()) run_expert_backward(expert, rows, x, hidden, dw13, dw2);
  }

  // Turns hidden.h into w h, and the derivatives in hidden.dg and hidden.du into the gradients of g and u.
  void run_expert_backward(const ExpertView& expert, const std::vector<Row>& rows, const Matrix& x, Hidden& hidden,
                           double* dw13, double* dw2) {
    const auto count = static_cast<std::int64_t>(rows.size());
    const std::int64_t width = expert.intermediate;
    const Matrix dy = gather(inputs_.dout, rows);
    Matrix dh = make_matrix(count, width);
    multiply_add({count, width, hidden_}, row_major(dy.data(), hidden_), row_major(expert.w2, width), dh.data(),
                 threads_);
    for (std::int64_t r = 0; r < count; ++r) {
      const Row& row = rows[static_cast<std::size_t>(r)];
      for (OpenChoice choice : hidden.choices[static_cast<std::size_t>(r)]) {
        const std::int64_t column = choice.output % width;
        choice.expert = expert.index;
        choice.token = row.token;
        choice.difference *= row.weight * dh[static_cast<std::size_t>(r * width + column)];
        results_.choices.push_back(choice);
      }
      double dw = 0.0;
      for (std::int64_t i = r * width; i < (r + 1) * width; ++i) {
        const auto index = static_cast<std::size_t>(i);
        dw += dh[index] * hidden.h[index];
        hidden.dg[index] *= row.weight * dh[index];
        hidden.du[index] *= row.weight * dh[index];
        hidden.h[index] *= row.weight;
      }
      if (row.slot >= 0) results_.dtopk_weights[static_cast<std::size_t>(row.slot)] = dw;
    }

    const auto dg = row_major(hidden.dg.data(), width);
    const auto du = row_major(hidden.du.data(), width);
    const auto x_view = row_major(x.data(), hidden_);
    const std::int64_t size = width * hidden_;
    Matrix dx = make_matrix(count, hidden_);
    multiply_add({count, hidden_, width}, dg, row_major(expert.w13, hidden_), dx.data(), threads_);
    multiply_add({count, hidden_, width}, du, row_major(expert.w13 + size, hidden_), dx.data(), threads_);
    scatter_add(dx, rows, results_.dx, [](const Row&) { return 1.0; });
    multiply_add({width, hidden_, count}, dg.transposed(), x_view, dw13, threads_);
    multiply_add({width, hidden_, count}, du.transposed(), x_view, dw13 + size, threads_);
    multiply_add({hidden_, width, count}, row_major(dy.data(), hidden_).transposed(), row_major(hidden.h.data(), width),
                 dw2, threads_);
  }

  const ReferenceInputs& inputs_;
  int threads_;
  std::int64_t hidden_;
  std::int64_t topk_;
  std::int64_t tokens_ = 0;
  ReferenceResults results_;
};

}  // namespace

ReferenceResults compute_reference(const ReferenceInputs& inputs, int threads) {
  return Reference(inputs, threads).run();
}

}  // namespace clowder

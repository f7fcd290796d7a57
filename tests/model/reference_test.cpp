#include "model/reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "model/activation/swiglu_clamp.h"
#include "model/bf16.h"
#include "model/matrix_product.h"

namespace clowder {
namespace {

std::vector<bf16> normals(std::int64_t count, double scale, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0f, static_cast<float>(scale));
  std::vector<bf16> values(count);
  for (bf16& value : values) value = to_bf16(normal(random));
  return values;
}

double as_double(bf16 value) { return static_cast<double>(to_float(value)); }

// A small layer whose inputs can be changed one at a time.
struct Layer {
  LayerShape shape;
  std::vector<bf16> x, w13, w2, shared_w13, shared_w2, dout;
  std::vector<std::int32_t> topk_idx;
  std::vector<float> topk_weights;

  explicit Layer(unsigned seed, const Activation& activation = {}) {
    std::mt19937 random(seed);
    shape.hidden = 32;
    shape.intermediate = 32;
    shape.shared_intermediate = 64;
    shape.num_experts = 4;
    shape.topk = 3;
    shape.max_tokens = 7;
    shape.activation = activation;
    x = normals(7 * 32, 1.0, random);
    dout = normals(7 * 32, 1.0, random);
    w13 = normals(4 * 64 * 32, 0.2, random);
    w2 = normals(4 * 32 * 32, 0.2, random);
    shared_w13 = normals(128 * 32, 0.2, random);
    shared_w2 = normals(32 * 64, 0.2, random);
    for (int i = 0; i < 21; ++i) {
      // Ids out of range and no route among them; the last token has none at all.
      topk_idx.push_back(i >= 18 ? -1 : static_cast<std::int32_t>(random() % 6) - 1);
      topk_weights.push_back(static_cast<float>(static_cast<int>(random() % 200) - 100) / 64.0f);
    }
  }

  ReferenceInputs inputs() const {
    return {shape, x, topk_idx, topk_weights, w13, w2, shared_w13, shared_w2, dout, false};
  }
  ReferenceResults run(int threads = 1) const { return compute_reference(inputs(), threads); }

  // The loss whose gradients backward gives.
  double loss() const {
    const ReferenceResults results = run();
    double sum = 0.0;
    for (std::size_t i = 0; i < results.out.size(); ++i) sum += results.out[i] * as_double(dout[i]);
    return sum;
  }
};

// One token through one expert, as plainly as can be.
void add_mlp(const bf16* x, const bf16* w13, const bf16* w2, int hidden, int width, double weight, double* out) {
  for (int i = 0; i < width; ++i) {
    double g = 0.0;
    double u = 0.0;
    for (int j = 0; j < hidden; ++j) {
      g += as_double(x[j]) * as_double(w13[i * hidden + j]);
      u += as_double(x[j]) * as_double(w13[(width + i) * hidden + j]);
    }
    const double h = g / (1.0 + std::exp(-g)) * u;
    for (int j = 0; j < hidden; ++j) out[j] += weight * h * as_double(w2[j * width + i]);
  }
}

TEST(Reference, ForwardIsTheFormula) {
  const Layer layer(5);
  const ReferenceResults results = layer.run();
  for (int t = 0; t < 7; ++t) {
    std::vector<double> out(32, 0.0);
    const bf16* x = &layer.x[t * 32];
    add_mlp(x, layer.shared_w13.data(), layer.shared_w2.data(), 32, 64, 1.0, out.data());
    for (int k = 0; k < 3; ++k) {
      const int e = layer.topk_idx[t * 3 + k];
      if (e < 0 || e >= 4) continue;
      const double weight = static_cast<double>(layer.topk_weights[t * 3 + k]);
      add_mlp(x, &layer.w13[e * 64 * 32], &layer.w2[e * 32 * 32], 32, 32, weight, out.data());
    }
    for (int j = 0; j < 32; ++j) ASSERT_NEAR(results.out[t * 32 + j], out[j], 1e-12);
  }
}

// Difference quotients of the loss. The loss is close to quadratic over a bf16 step, so steps may be that large.
void expect_gradients(Layer& layer, std::vector<bf16>& tensor, const std::vector<double>& gradient, unsigned seed) {
  std::mt19937 random(seed);
  for (int round = 0; round < 12; ++round) {
    const std::size_t i = random() % tensor.size();
    const bf16 value = tensor[i];
    const float step = 0x1p-7f;
    tensor[i] = to_bf16(to_float(value) + step);
    const double above = layer.loss();
    const double above_at = as_double(tensor[i]);
    tensor[i] = to_bf16(to_float(value) - step);
    const double below = layer.loss();
    const double below_at = as_double(tensor[i]);
    tensor[i] = value;
    const double quotient = (above - below) / (above_at - below_at);
    ASSERT_NEAR(quotient, gradient[i], 2e-3 * (1.0 + std::abs(gradient[i]))) << i;
  }
}

TEST(Reference, GradientsAreThoseOfForward) {
  for (unsigned seed = 0; seed < 3; ++seed) {
    Layer layer(10 + seed);
    const ReferenceResults results = layer.run();
    expect_gradients(layer, layer.x, results.dx, seed);
    expect_gradients(layer, layer.w13, results.dw13, seed);
    expect_gradients(layer, layer.w2, results.dw2, seed);
    expect_gradients(layer, layer.shared_w13, results.dshared_w13, seed);
    expect_gradients(layer, layer.shared_w2, results.dshared_w2, seed);
    for (std::size_t i = 0; i < layer.topk_weights.size(); ++i) {
      Layer other = layer;
      other.topk_weights[i] += 1.0f;  // the loss is linear in it
      ASSERT_NEAR(other.loss() - layer.loss(), results.dtopk_weights[i], 1e-10);
    }
  }
}

TEST(Reference, ExpertsWithoutRowsAndSlotsWithoutRoutesGetZeros) {
  Layer layer(20);
  for (std::int32_t& id : layer.topk_idx) id = id == 2 ? -1 : id;
  const ReferenceResults results = layer.run();
  for (int i = 0; i < 64 * 32; ++i) ASSERT_EQ(results.dw13[2 * 64 * 32 + i], 0.0);
  for (int i = 0; i < 32 * 32; ++i) ASSERT_EQ(results.dw2[2 * 32 * 32 + i], 0.0);
  for (std::size_t slot = 0; slot < layer.topk_idx.size(); ++slot) {
    const bool routed = layer.topk_idx[slot] >= 0 && layer.topk_idx[slot] < 4;
    EXPECT_EQ(results.dtopk_weights[slot] != 0.0, routed);
  }
}

// g = 2.001 rounds to 2 in bf16, so a clamp at 2 neither clamps it nor stops its gradient; 2.03 is clamped.
TEST(Reference, ClampTakesItsMasksFromBf16) {
  for (const auto& [g, is_clamped] : {std::pair(2.001, false), std::pair(2.03, true)}) {
    Layer layer(30, {ActivationKind::kSwigluClamp, 2.0f});
    layer.shape.shared_intermediate = 0;
    layer.shape.topk = 1;
    layer.topk_idx = {0};
    layer.topk_weights = {1.0f};
    layer.x.assign(32, bf16{0});
    layer.dout.resize(32);
    layer.w13.assign(layer.w13.size(), bf16{0});
    // Two exact terms make a g that bf16 does not hold.
    layer.x[0] = layer.x[1] = to_bf16(1.0f);
    layer.w13[0] = to_bf16(2.0f);
    layer.w13[1] = to_bf16(static_cast<float>(g - 2.0));
    layer.w13[32 * 32] = to_bf16(1.0f);
    const double exact_g = 2.0 + as_double(layer.w13[1]);
    const ReferenceResults results = layer.run();
    const double used = is_clamped ? 2.0 : exact_g;
    const double h = used / (1.0 + std::exp(-used));
    for (int j = 0; j < 32; ++j) ASSERT_NEAR(results.out[j], h * as_double(layer.w2[j * 32]), 1e-14);
    EXPECT_EQ(results.dw13[0] == 0.0, is_clamped);
    EXPECT_NE(results.dw13[32 * 32], 0.0);
  }
}

// g = 2 + 2^-7 is halfway between 2 and the next bf16 value: an fp32 sum just above it is clamped at 2.
TEST(Reference, AGateThatMayRoundEitherWayIsAnOpenChoice) {
  for (const double g : {2.0 + 0x1p-7, 2.0 + 0x1p-6}) {
    Layer layer(31, {ActivationKind::kSwigluClamp, 2.0f});
    layer.shape.shared_intermediate = 0;
    layer.shape.topk = 1;
    layer.topk_idx = {3};
    layer.topk_weights = {0.5f};
    layer.x.assign(32, bf16{0});
    layer.dout.resize(32);
    layer.w13.assign(layer.w13.size(), bf16{0});
    layer.x[0] = layer.x[1] = to_bf16(1.0f);
    bf16* w13 = &layer.w13[3 * 64 * 32];
    w13[0] = to_bf16(2.0f);
    w13[1] = to_bf16(static_cast<float>(g - 2.0));
    w13[32 * 32] = to_bf16(1.0f);
    const ReferenceResults results = layer.run();
    const double* row = &results.dw13[3 * 64 * 32];
    if (g > 2.0 + 0x1p-7) {  // clamped, whatever an engine's sum
      EXPECT_TRUE(results.choices.empty());
      EXPECT_EQ(row[0], 0.0);
      continue;
    }
    ASSERT_EQ(results.choices.size(), 1u);
    EXPECT_EQ(results.choices[0].expert, 3);
    EXPECT_EQ(results.choices[0].token, 0);
    EXPECT_EQ(results.choices[0].output, 0);
    EXPECT_NE(row[0], 0.0);
    EXPECT_NEAR(row[0] + results.choices[0].difference, 0.0, 1e-15) << "the other side is clamped";
  }
}

TEST(Reference, ThreadsDoNotChangeABit) {
  const Layer layer(40);
  const ReferenceResults one = layer.run(1);
  const ReferenceResults many = layer.run(5);
  EXPECT_EQ(one.out, many.out);
  EXPECT_EQ(one.dx, many.dx);
  EXPECT_EQ(one.dw13, many.dw13);
  EXPECT_EQ(one.dshared_w2, many.dshared_w2);
}

TEST(MatrixProduct, AgreesWithTheDefinitionAtEverySize) {
  std::mt19937 random(6);
  std::normal_distribution<double> normal;
  for (int round = 0; round < 60; ++round) {
    const ProductShape shape{static_cast<std::int64_t>(random() % 40), static_cast<std::int64_t>(random() % 40),
                             static_cast<std::int64_t>(random() % 600)};
    std::vector<double> a(shape.rows * shape.inner), b(shape.inner * shape.columns), c(shape.rows * shape.columns);
    for (auto* matrix : {&a, &b, &c}) {
      for (double& value : *matrix) value = normal(random);
    }
    std::vector<double> expected = c;
    for (std::int64_t i = 0; i < shape.rows; ++i) {
      for (std::int64_t j = 0; j < shape.columns; ++j) {
        for (std::int64_t k = 0; k < shape.inner; ++k) {
          // a is held transposed.
          expected[i * shape.columns + j] += a[k * shape.rows + i] * b[k * shape.columns + j];
        }
      }
    }
    std::vector<double> threaded = c;
    const auto a_view = row_major(a.data(), shape.rows).transposed();
    multiply_add(shape, a_view, row_major(b.data(), shape.columns), c.data(), 1);
    multiply_add(shape, a_view, row_major(b.data(), shape.columns), threaded.data(), 4);
    ASSERT_EQ(c, threaded);
    for (std::size_t i = 0; i < c.size(); ++i) ASSERT_NEAR(c[i], expected[i], 1e-11);
  }
}

}  // namespace
}  // namespace clowder

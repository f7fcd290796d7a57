// Trains an MoE layer of 4 experts to imitate random targets, and tells by its exit code whether it did.
#include <clowder/layer.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <random>
constexpr int kTokens = 64, kHidden = 64, kWidth = 96, kExperts = 4, kTopk = 2, kMatrix = kHidden * kWidth;
clowder::bf16 narrow(float v) { return {static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(v) >> 16)}; }
float widen(clowder::bf16 v) { return std::bit_cast<float>(std::uint32_t{v.bits} << 16); }

int main() {
  clowder::Workspace workspace({kHidden, kWidth, 0, kExperts, kTopk, kTokens, {}}, clowder::make_virtual_group(1));
  std::mt19937 random;
  std::normal_distribution<float> normal;
  std::vector<float> w(3 * kExperts * kMatrix), dw(w.size()), target(kTokens * kHidden), mix(kTokens * kTopk, 0.5f);
  std::vector<clowder::bf16> weights(w.size()), x(target.size()), out(target.size()), dout(target.size());
  std::vector<std::int32_t> topk_idx(mix.size()), schedule(workspace.schedule_words());
  for (float& value : w) value = normal(random) / 8;
  for (float& value : target) value = normal(random);
  for (clowder::bf16& value : x) value = narrow(normal(random));
  for (std::size_t slot = 0; slot < mix.size(); ++slot) topk_idx[slot] = (slot + slot / 7) % kExperts;
  std::vector<clowder::bf16> saved(workspace.saved_rows() * 2 * kWidth);
  clowder::ForwardInputs f{schedule.data(), x.data(), mix.data(), {}, {}, out.data(), {saved.data()}};
  clowder::BackwardInputs b{schedule.data(), x.data(), dout.data(), mix.data(), {}, {}, {saved.data()}, {}, {}, {}, {}};
  for (int m = 0; m < 3 * kExperts * kMatrix; m += 3 * kMatrix) {  // an expert's W1, W3, W2 stand one after the other
    f.experts.push_back({&weights[m], &weights[m + kMatrix], &weights[m + 2 * kMatrix]});
    b.expert_gradients.push_back({&dw[m], &dw[m + kMatrix], &dw[m + 2 * kMatrix]});
  }
  b.experts = f.experts;
  workspace.build_schedule({{topk_idx.data(), false, kTokens}}, {schedule.data()});
  for (int step = 0; step < 100; ++step) {
    for (std::size_t i = 0; i < w.size(); ++i) weights[i] = narrow(w[i] -= 0.01f * dw[i]);
    workspace.forward({f});
    for (std::size_t i = 0; i < out.size(); ++i) dout[i] = narrow(widen(out[i]) - target[i]);
    workspace.backward({b}, clowder::GradientMode::kWriteFp32);
  }
  std::printf("error of the first output: %.4f\n", widen(dout[0]));
  return std::abs(widen(dout[0])) < 0.2f ? 0 : 1;
}

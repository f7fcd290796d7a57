#include "check/problem.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <limits>
#include <numeric>
#include <sstream>

#include "check/random.h"
#include "model/bf16.h"
#include "model/parallel.h"
#include "model/shape.h"

namespace clowder::check {
namespace {

constexpr std::int64_t kFillBlock = 1 << 14;

[[noreturn]] void reject(const std::string& message) { throw Error(ErrorCode::kArgument, message); }

template <class Number>
bool parse_number(const std::string& text, Number& number) {
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, number);
  return error == std::errc{} && stopped == end;
}

// values[i] = make(i) for a tensor of `count`.
template <class T, class Make>
std::vector<T> fill(std::int64_t count, int threads, const Make& make) {
  std::vector<T> values(static_cast<std::size_t>(count));
  parallel_for((count + kFillBlock - 1) / kFillBlock, threads, [&](std::int64_t block) {
    const std::int64_t end = std::min(count, (block + 1) * kFillBlock);
    for (std::int64_t i = block * kFillBlock; i < end; ++i) values[i] = make(i);
  });
  return values;
}

class ProblemMaker {
 public:
  ProblemMaker(const ProblemSpec& spec, int threads) : spec_(spec), threads_(threads) {}

  Problem make() {
    Problem problem;
    problem.spec = spec_;
    problem.shape = make_shape();
    check_fractions();
    const std::int64_t tokens = spec_.tokens();
    const std::int64_t hidden = spec_.hidden;
    problem.topk_idx = make_routes();
    problem.topk_weights = make_topk_weights();
    problem.x = normals(Stream::kX, tokens * hidden, spec_.scale);
    problem.w13 = normals(Stream::kW13, expert_size(2), fan_in(hidden));
    problem.w2 = normals(Stream::kW2, expert_size(1), fan_in(spec_.intermediate));
    problem.shared_w13 = normals(Stream::kSharedW13, shared_size(2), fan_in(hidden));
    problem.shared_w2 = normals(Stream::kSharedW2, shared_size(1), fan_in(spec_.shared_intermediate));
    if (spec_.forward_only) return problem;
    problem.dout = normals(Stream::kDout, tokens * hidden, 1.0);
    if (is_accumulating(spec_.gradient_mode)) {
      problem.main_w13 = main_gradient(Stream::kMainW13, expert_size(2));
      problem.main_w2 = main_gradient(Stream::kMainW2, expert_size(1));
      problem.main_shared_w13 = main_gradient(Stream::kMainSharedW13, shared_size(2));
      problem.main_shared_w2 = main_gradient(Stream::kMainSharedW2, shared_size(1));
    }
    return problem;
  }

 private:
  std::int64_t slots() const { return spec_.tokens() * spec_.topk; }
  std::int64_t expert_size(int matrices) const {
    return matrices * spec_.num_experts * spec_.intermediate * spec_.hidden;
  }
  std::int64_t shared_size(int matrices) const { return matrices * spec_.shared_intermediate * spec_.hidden; }
  static double fan_in(std::int64_t width) { return width > 0 ? 1.0 / std::sqrt(static_cast<double>(width)) : 0.0; }
  Random random(Stream stream) const { return Random(spec_.seed, stream); }

  LayerShape make_shape() const {
    for (const std::int64_t tokens : spec_.tokens_per_rank) {
      if (tokens < 0) reject("tokens: " + std::to_string(tokens) + ", must be 0 or more");
    }
    LayerShape shape;
    shape.hidden = spec_.hidden;
    shape.intermediate = spec_.intermediate;
    shape.shared_intermediate = spec_.shared_intermediate;
    shape.num_experts = spec_.num_experts;
    shape.topk = spec_.topk;
    shape.max_tokens = *std::max_element(spec_.tokens_per_rank.begin(), spec_.tokens_per_rank.end());
    shape.activation = spec_.activation;
    validate(shape, spec_.num_ranks());
    return shape;
  }

  void check_fractions() const {
    if (!(spec_.drop >= 0.0 && spec_.drop <= 1.0)) {
      reject("drop: " + std::to_string(spec_.drop) + ", must be from 0 to 1");
    }
    if (spec_.bad_ids < 0 || spec_.bad_ids > slots()) {
      reject("bad-ids: " + std::to_string(spec_.bad_ids) + ", must be from 0 to the number of slots, " +
             std::to_string(slots()));
    }
    if (!(spec_.scale > 0.0 && std::isfinite(spec_.scale))) {
      reject("scale: " + std::to_string(spec_.scale) + ", must be finite and above 0");
    }
  }

  std::vector<bf16> normals(Stream stream, std::int64_t count, double scale) const {
    const Random source = random(stream);
    return fill<bf16>(count, threads_, [&](std::int64_t i) {
      return to_bf16(static_cast<float>(source.normal(static_cast<std::uint64_t>(i)) * scale));
    });
  }

  std::vector<float> main_gradient(Stream stream, std::int64_t count) const {
    const Random source = random(stream);
    const bool rounds = is_bf16(spec_.gradient_mode);
    return fill<float>(count, threads_, [&](std::int64_t i) {
      const auto value = static_cast<float>(source.normal(static_cast<std::uint64_t>(i)));
      return rounds ? to_float(to_bf16(value)) : value;
    });
  }

  std::vector<float> make_topk_weights() const {
    const Random source = random(Stream::kTopkWeights);
    std::vector<float> weights = fill<float>(slots(), threads_, [&](std::int64_t slot) {
      const double uniform = source.uniform(static_cast<std::uint64_t>(slot));
      switch (spec_.topk_weights) {
        case TopkWeights::kZeros:
          return 0.0f;
        case TopkWeights::kSigned:
          return static_cast<float>(2.0 * uniform - 1.0);
        case TopkWeights::kUnnormalised:
          return static_cast<float>(3.0 * uniform);
        case TopkWeights::kUniform:
          break;
      }
      return static_cast<float>(uniform);
    });
    if (spec_.topk_weights == TopkWeights::kUniform) normalise(weights);
    return weights;
  }

  void normalise(std::vector<float>& weights) const {
    for (auto token = weights.begin(); token != weights.end(); token += spec_.topk) {
      const float sum = std::accumulate(token, token + spec_.topk, 0.0f);
      std::for_each(token, token + spec_.topk, [&](float& weight) { weight /= sum; });
    }
  }

  std::vector<std::int32_t> make_routes() const {
    std::vector<std::int32_t> ids = choose_experts();
    for (const std::int64_t slot : choose_slots(Stream::kDroppedSlots, fraction_of_slots(spec_.drop))) ids[slot] = -1;
    int which = 0;
    for (const std::int64_t slot : choose_slots(Stream::kBadSlots, spec_.bad_ids)) ids[slot] = bad_id(which++);
    return ids;
  }

  std::int32_t bad_id(int which) const {
    constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
    const std::int32_t bad[] = {spec_.num_experts, spec_.num_experts + 7, -2, kMost, -kMost - 1};
    return bad[which % 5];
  }

  std::int64_t fraction_of_slots(double fraction) const {
    return std::llround(fraction * static_cast<double>(slots()));
  }

  // `count` distinct slots at random, ascending.
  std::vector<std::int64_t> choose_slots(Stream stream, std::int64_t count) const {
    if (count == 0) return {};
    const Random source = random(stream);
    std::vector<std::int64_t> order(static_cast<std::size_t>(slots()));
    std::iota(order.begin(), order.end(), std::int64_t{0});
    const auto key = [&](std::int64_t slot) { return source.bits(static_cast<std::uint64_t>(slot)); };
    std::nth_element(order.begin(), order.begin() + (count - 1), order.end(),
                     [&](std::int64_t a, std::int64_t b) { return key(a) < key(b); });
    order.resize(static_cast<std::size_t>(count));
    std::sort(order.begin(), order.end());
    return order;
  }

  std::vector<std::int32_t> choose_experts() const {
    switch (spec_.routing.kind) {
      case RoutingKind::kZipf:
        return zipf_experts();
      case RoutingKind::kHot:
        return hot_experts();
      case RoutingKind::kOne:
        return one_expert();
      case RoutingKind::kFile:
        return read_experts();
      case RoutingKind::kUniform:
        break;
    }
    return uniform_experts();
  }

  // A token's slots draw until they differ, from a counter of the token's own.
  std::vector<std::int32_t> uniform_experts() const {
    const Random source = random(Stream::kRouting);
    const bool distinct = spec_.topk <= spec_.num_experts;
    std::vector<std::int32_t> ids;
    for (std::int64_t token = 0; token < spec_.tokens(); ++token) {
      std::uint64_t counter = static_cast<std::uint64_t>(token) << 20;
      const std::size_t first = ids.size();
      while (ids.size() < first + static_cast<std::size_t>(spec_.topk)) {
        const auto id =
            static_cast<std::int32_t>(source.bits(counter++) % static_cast<std::uint64_t>(spec_.num_experts));
        const bool is_new = std::find(ids.begin() + static_cast<std::ptrdiff_t>(first), ids.end(), id) == ids.end();
        if (is_new || !distinct) ids.push_back(id);
      }
    }
    return ids;
  }

  // The K largest of log p(e) + Gumbel noise are K draws without replacement. Where K > E, the order starts again.
  std::vector<std::int32_t> zipf_experts() const {
    const Random source = random(Stream::kRouting);
    const std::int32_t experts = spec_.num_experts;
    std::vector<std::int32_t> ids(static_cast<std::size_t>(slots()));
    parallel_for(spec_.tokens(), threads_, [&](std::int64_t token) {
      std::vector<std::pair<double, std::int32_t>> keys;
      for (std::int32_t e = 0; e < experts; ++e) {
        const auto counter = static_cast<std::uint64_t>(token * experts + e);
        const double gumbel = -std::log(-std::log(source.uniform(counter)));
        keys.emplace_back(spec_.routing.value * std::log(e + 1.0) - gumbel, e);
      }
      const std::int32_t drawn = std::min(spec_.topk, experts);
      std::partial_sort(keys.begin(), keys.begin() + drawn, keys.end());
      for (std::int32_t k = 0; k < spec_.topk; ++k) ids[token * spec_.topk + k] = keys[k % experts].second;
    });
    return ids;
  }

  std::vector<std::int32_t> hot_experts() const {
    const double fraction = spec_.routing.value;
    if (!(fraction >= 0.0 && fraction <= 1.0)) {
      reject("routing: hot:" + std::to_string(fraction) + ", must have a fraction from 0 to 1");
    }
    const Random source = random(Stream::kRouting);
    const auto others = static_cast<std::uint64_t>(spec_.num_experts - 1);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(slots()));
    for (std::int64_t slot = 0; slot < slots(); ++slot) {
      const std::uint64_t bits = source.bits(static_cast<std::uint64_t>(slot));
      ids[slot] = others == 0 ? 0 : static_cast<std::int32_t>(1 + bits % others);
    }
    for (const std::int64_t slot : choose_slots(Stream::kHotSlots, fraction_of_slots(fraction))) ids[slot] = 0;
    return ids;
  }

  std::vector<std::int32_t> one_expert() const {
    const std::int32_t expert = spec_.routing.expert;
    if (expert < 0 || expert >= spec_.num_experts) {
      reject("routing: one:" + std::to_string(expert) + ", must be an expert from 0 to " +
             std::to_string(spec_.num_experts - 1));
    }
    return std::vector<std::int32_t>(static_cast<std::size_t>(slots()), expert);
  }

  std::vector<std::int32_t> read_experts() const {
    const std::string& path = spec_.routing.path;
    std::ifstream file(path);
    if (!file) reject("routing: the file " + path + " cannot be read; give a file with one token a line, K ids");
    std::vector<std::int32_t> ids;
    std::string line;
    std::int64_t number = 0;
    while (std::getline(file, line)) {
      ++number;
      const std::size_t before = ids.size();
      std::istringstream words(line);
      for (std::int32_t id = 0; words >> id;) ids.push_back(id);
      const auto found = static_cast<std::int64_t>(ids.size() - before);
      if (words.eof() && (found == spec_.topk || found == 0)) continue;
      reject("routing: " + path + " line " + std::to_string(number) + " must hold " + std::to_string(spec_.topk) +
             " whole numbers, one for each slot");
    }
    if (static_cast<std::int64_t>(ids.size()) == slots()) return ids;
    reject("routing: " + path + " holds " + std::to_string(ids.size()) + " ids, must hold tokens * topk, " +
           std::to_string(slots()));
  }

  const ProblemSpec& spec_;
  int threads_;
};

}  // namespace

Routing parse_routing(const std::string& text) {
  const std::size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  const std::string value = colon == std::string::npos ? "" : text.substr(colon + 1);
  Routing routing;
  if (text == "uniform") return routing;
  if (name == "zipf" && parse_number(value, routing.value) && std::isfinite(routing.value)) {
    routing.kind = RoutingKind::kZipf;
    return routing;
  }
  if (name == "hot" && parse_number(value, routing.value)) {
    routing.kind = RoutingKind::kHot;
    return routing;
  }
  if (name == "one" && parse_number(value, routing.expert)) {
    routing.kind = RoutingKind::kOne;
    return routing;
  }
  if (name == "file" && !value.empty()) {
    routing.kind = RoutingKind::kFile;
    routing.path = value;
    return routing;
  }
  reject("routing: \"" + text + "\", must be uniform, zipf:S, hot:F, one:E or file:PATH");
}

TopkWeights parse_topk_weights(const std::string& text) {
  if (text == "uniform") return TopkWeights::kUniform;
  if (text == "zeros") return TopkWeights::kZeros;
  if (text == "signed") return TopkWeights::kSigned;
  if (text == "unnormalised") return TopkWeights::kUnnormalised;
  reject("topk-weights: \"" + text + "\", must be uniform, zeros, signed or unnormalised");
}

GradientMode parse_gradient_mode(const std::string& text) {
  if (text == "bf16") return GradientMode::kWriteBf16;
  if (text == "fp32") return GradientMode::kWriteFp32;
  if (text == "accumulate-bf16") return GradientMode::kAccumulateBf16;
  if (text == "accumulate-fp32") return GradientMode::kAccumulateFp32;
  reject("wgrad: \"" + text + "\", must be bf16, fp32, accumulate-fp32 or accumulate-bf16");
}

std::int64_t ProblemSpec::tokens() const {
  return std::accumulate(tokens_per_rank.begin(), tokens_per_rank.end(), std::int64_t{0});
}

std::vector<std::int64_t> split_tokens(std::int64_t total, int ranks) {
  if (total < 0) reject("tokens: " + std::to_string(total) + ", must be 0 or more");
  if (ranks < 1) reject("ranks: " + std::to_string(ranks) + ", must be 1 or more");
  std::vector<std::int64_t> tokens;
  for (int r = 0; r < ranks; ++r) tokens.push_back(total / ranks + (r < total % ranks ? 1 : 0));
  return tokens;
}

Problem make_problem(const ProblemSpec& spec, int threads) { return ProblemMaker(spec, threads).make(); }

}  // namespace clowder::check

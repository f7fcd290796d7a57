#include "model/shape.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

namespace clowder {
namespace {

// Far above any model, low enough that products of two widths and of a width and a tile fit every index in use.
constexpr std::int64_t kMaxWidth = 65536;
constexpr std::int64_t kMaxExperts = 65536;
constexpr std::int64_t kWidthStep = 32;

[[noreturn]] void reject(const std::string& argument, const std::string& value, const std::string& allowed) {
  throw Error(ErrorCode::kArgument, argument + ": " + value + ", must be " + allowed);
}

void validate_width(const char* argument, std::int64_t width, std::int64_t least) {
  if (width >= least && width <= kMaxWidth && width % kWidthStep == 0) return;
  reject(argument, std::to_string(width),
         "a multiple of " + std::to_string(kWidthStep) + " from " + std::to_string(least) + " to " +
             std::to_string(kMaxWidth));
}

void validate_range(const char* argument, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value >= least && value <= most) return;
  reject(argument, std::to_string(value), "from " + std::to_string(least) + " to " + std::to_string(most));
}

// A schedule is one flat int32 buffer whose entries are slots of all ranks.
std::int64_t most_tokens(const LayerShape& shape, int num_ranks) {
  const std::int64_t words_beside_rows = 5 + num_ranks + 2 * std::int64_t{shape.num_experts};
  const std::int64_t words = std::numeric_limits<std::int32_t>::max() - words_beside_rows;
  return words / (std::int64_t{num_ranks} * shape.topk + 1);
}

void validate_activation(const Activation& activation) {
  switch (activation.kind) {
    case ActivationKind::kSwiglu:
    case ActivationKind::kGeglu:
    case ActivationKind::kReglu:
    case ActivationKind::kGptOss:
      return;
    case ActivationKind::kSwigluClamp:
      if (activation.limit > 0.0f && std::isfinite(activation.limit)) return;
      reject("activation", "a clamp with limit " + std::to_string(activation.limit), "finite and above 0");
  }
  reject("activation", "kind " + std::to_string(static_cast<int>(activation.kind)), "one of ActivationKind");
}

}  // namespace

void validate(const LayerShape& shape, int num_ranks) {
  validate_width("hidden", shape.hidden, kWidthStep);
  validate_width("intermediate", shape.intermediate, kWidthStep);
  validate_width("shared_intermediate", shape.shared_intermediate, 0);
  validate_range("num_experts", shape.num_experts, 1, kMaxExperts);
  validate_range("group", num_ranks, 1, kMaxExperts);
  if (shape.num_experts % num_ranks != 0) {
    reject("num_experts", std::to_string(shape.num_experts),
           "a multiple of the number of ranks, " + std::to_string(num_ranks));
  }
  validate_range("topk", shape.topk, 1, kMaxTopk);
  validate_range("max_tokens", shape.max_tokens, 0, most_tokens(shape, num_ranks));
  validate_activation(shape.activation);
}

}  // namespace clowder

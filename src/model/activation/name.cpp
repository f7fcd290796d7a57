#include "model/activation/name.h"

#include <charconv>
#include <cmath>
#include <string_view>

namespace clowder {
namespace {

constexpr std::string_view kSwigluName = "swiglu";
constexpr std::string_view kSwigluClampPrefix = "swiglu-clamp:";

bool parse_limit(std::string_view text, float& limit) {
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, limit);
  return error == std::errc{} && stopped == end && limit > 0.0f && std::isfinite(limit);
}

}  // namespace

Activation parse_activation(const std::string& name) {
  if (name == kSwigluName) return {};
  const std::string_view text = name;
  Activation clamp{ActivationKind::kSwigluClamp, 0.0f};
  if (text.starts_with(kSwigluClampPrefix) && parse_limit(text.substr(kSwigluClampPrefix.size()), clamp.limit)) {
    return clamp;
  }
  throw Error(ErrorCode::kArgument,
              "activation: \"" + name + "\", must be \"swiglu\" or \"swiglu-clamp:LIMIT\" with a limit above 0");
}

std::string to_string(const Activation& activation) {
  if (activation.kind == ActivationKind::kSwiglu) return std::string(kSwigluName);
  char digits[32];
  const auto [end, error] = std::to_chars(digits, digits + sizeof digits, activation.limit);
  return std::string(kSwigluClampPrefix) + std::string(digits, error == std::errc{} ? end : digits);
}

}  // namespace clowder

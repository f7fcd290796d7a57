#include "model/activation/name.h"

#include <charconv>
#include <cmath>
#include <string_view>

namespace clowder {
namespace {

// The part that stands before a limit, or all of the name.
struct Named {
  ActivationKind kind;
  std::string_view name;
};
constexpr Named kNames[] = {
    {ActivationKind::kSwiglu, "swiglu"},  {ActivationKind::kSwigluClamp, "swiglu-clamp:"},
    {ActivationKind::kGeglu, "geglu"},    {ActivationKind::kReglu, "reglu"},
    {ActivationKind::kGptOss, "gpt-oss"},
};

bool has_limit(ActivationKind kind) { return kind == ActivationKind::kSwigluClamp; }

bool parse_limit(std::string_view text, float& limit) {
  const char* end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, limit);
  return error == std::errc{} && stopped == end && limit > 0.0f && std::isfinite(limit);
}

}  // namespace

Activation parse_activation(const std::string& name) {
  const std::string_view text = name;
  for (const Named& named : kNames) {
    Activation activation{named.kind, 0.0f};
    if (!has_limit(named.kind) && text == named.name) return activation;
    if (has_limit(named.kind) && text.starts_with(named.name) &&
        parse_limit(text.substr(named.name.size()), activation.limit)) {
      return activation;
    }
  }
  throw Error(ErrorCode::kArgument, "activation: \"" + name + "\", must be " + kActivationNames);
}

std::string to_string(const Activation& activation) {
  std::string text;
  for (const Named& named : kNames) {
    if (named.kind == activation.kind) text = named.name;
  }
  if (!has_limit(activation.kind)) return text;
  char digits[32];
  const auto [end, error] = std::to_chars(digits, digits + sizeof digits, activation.limit);
  return text.append(digits, error == std::errc{} ? end : digits);
}

}  // namespace clowder

#include "clowder/types.h"

namespace clowder {

Error::Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
Error::Error(const Error&) noexcept = default;
Error& Error::operator=(const Error&) noexcept = default;
Error::~Error() = default;

const char* to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::kArgument:
      return "argument";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kTimeout:
      return "timeout";
    case ErrorCode::kInternal:
      break;
  }
  return "internal";
}

const char* to_string(EngineKind kind) {
  switch (kind) {
    case EngineKind::kCpu:
      return "cpu";
    case EngineKind::kSm90:
      return "sm90";
  }
  return "unknown";
}

}  // namespace clowder

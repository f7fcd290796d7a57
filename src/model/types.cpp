#include "clowder/types.h"

namespace clowder {

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

}  // namespace clowder

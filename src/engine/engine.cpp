#include "engine/engine.h"

#include <string>

#include "engine/cpu/engine.h"
#ifdef CLOWDER_HAS_SM90
#include "engine/sm90/engine.h"
#endif

namespace clowder {
namespace {

// Null: not in this build.
const EngineType* find_engine(EngineKind kind) {
  switch (kind) {
    case EngineKind::kCpu:
      return &cpu::kEngineType;
    case EngineKind::kSm90:
#ifdef CLOWDER_HAS_SM90
      return &sm90::kEngineType;
#else
      return nullptr;
#endif
  }
  throw Error(ErrorCode::kArgument,
              "engine: kind " + std::to_string(static_cast<int>(kind)) + ", must be one of EngineKind");
}

}  // namespace

const EngineType& engine_type(EngineKind kind) {
  const EngineType* type = find_engine(kind);
  if (type != nullptr) return *type;
  const std::string name = to_string(kind);
  throw Error(ErrorCode::kUnsupported, "engine: this build has no " + name + " engine; use the cpu engine");
}

bool is_built(EngineKind kind) { return find_engine(kind) != nullptr; }

bool is_usable(EngineKind kind) { return is_built(kind) && find_engine(kind)->is_usable(); }

}  // namespace clowder

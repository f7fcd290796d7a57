// Types shared by every part of Clowder: the bf16 storage type, the activation, the layer's shape, and the one
// error type that crosses the library's border.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "clowder/export.h"

namespace clowder {

// Storage of one bfloat16: the upper half of an IEEE binary32. Conversions stand in src/model/bf16.h.
struct bf16 {
  std::uint16_t bits;
};

enum class ErrorCode {
  kArgument,     // a caller's value cannot be used; the message names the argument, its value and what it may be
  kUnsupported,  // right, but not on this machine or in this build
  kTimeout,      // a wait ran out of time; the message names the ranks and the phase
  kInternal,     // a fault of Clowder's own
};

// The name that users see: "argument", "unsupported", "timeout" or "internal".
CLOWDER_API const char* to_string(ErrorCode code);

// Its type information stands in the library alone, so that whoever links it catches what another part threw.
class CLOWDER_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message);
  Error(const Error&) noexcept;
  Error& operator=(const Error&) noexcept;
  ~Error() override;
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

// What carries out a layer's passes. Engines differ in where they run and in tuning, never in what a layer computes;
// bits are comparable on one engine only.
enum class EngineKind : std::int32_t {
  kCpu,   // threads; all pointers are to host memory
  kSm90,  // an NVIDIA GPU of compute capability 9.0 (H100, H200); all pointers are to memory of that device
};

// The name that users see: "cpu" or "sm90".
CLOWDER_API const char* to_string(EngineKind kind);

enum class ActivationKind : std::int32_t {
  kSwiglu,       // f(g, u) = silu(g) * u
  kSwigluClamp,  // f(g, u) = silu(min(g, limit)) * clamp(u, -limit, limit)
  kGeglu,        // f(g, u) = gelu(g) * u, gelu in its tanh form
  kReglu,        // f(g, u) = max(g, 0) * u
  kGptOss,       // f(g, u) = (clamp(u, -7, 7) + 1) * g' * sigmoid(1.702 g') with g' = min(g, 7)
};

struct Activation {
  ActivationKind kind = ActivationKind::kSwiglu;
  float limit = 0.0f;  // of kSwigluClamp only; > 0
};

// What one expert-parallel MoE layer is, whatever engine runs it. Counts are in elements.
struct LayerShape {
  std::int64_t hidden = 0;               // H, a positive multiple of 32
  std::int64_t intermediate = 0;         // I, a positive multiple of 32
  std::int64_t shared_intermediate = 0;  // Is, a multiple of 32; 0 = no shared expert
  std::int32_t num_experts = 0;          // E over all ranks, a multiple of the number of ranks
  std::int32_t topk = 0;                 // K, 1 to 16
  std::int64_t max_tokens = 0;           // the most tokens that one rank may hold in a step; 0 is legal
  Activation activation;
};

}  // namespace clowder

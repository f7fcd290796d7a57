// What a rank's part of the symmetric memory holds, and where.
//
//   ids       two buffers, used in turn: T_r, then topk_idx [T_r, K]      written by the rank, read by its peers
//   x, dy     staged inputs [max_tokens, H]; not with one rank            written by the rank, read by its peers
//   weights   staged topk_weights [max_tokens, K]; not with one rank      written by the rank, read by its peers
//   slots     [max_tokens * K, H]: y of each slot, in backward its dx     written by peers, read by the rank
//   dw        [max_tokens * K]: gradient of each slot's weight            written by peers, read by the rank
//   flags     one for each kind and writer, a cache line each             written by peers, read by the rank
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "clowder/types.h"
#include "group/aligned_memory.h"
#include "plan/task.h"

namespace clowder::cpu {

// Pointers into one rank's part.
struct RankMemory {
  std::int32_t* ids[2] = {};
  bf16* x = nullptr;
  bf16* dy = nullptr;
  float* weights = nullptr;
  bf16* slots = nullptr;
  float* dw = nullptr;
  std::byte* flags = nullptr;
  int num_ranks = 0;

  std::atomic_ref<std::uint32_t> flag(plan::FlagKind kind, int writer) const;
};

class SymmetricLayout {
 public:
  SymmetricLayout(const LayerShape& shape, int num_ranks)
      : num_ranks_(num_ranks),
        num_slots_(static_cast<std::size_t>(shape.max_tokens) * static_cast<std::size_t>(shape.topk)),
        row_bytes_(static_cast<std::size_t>(shape.hidden) * sizeof(bf16)),
        staged_tokens_(num_ranks > 1 ? static_cast<std::size_t>(shape.max_tokens) : 0) {}

  std::size_t bytes() const { return lay_out(0, nullptr); }

  RankMemory view(std::byte* base) const {
    RankMemory memory;
    lay_out(reinterpret_cast<std::uintptr_t>(base), &memory);
    return memory;
  }

  static constexpr std::size_t kFlagBytes = 64;

 private:
  // Fills `memory`, unless null, with what begins at address `at`, and returns the end.
  std::uintptr_t lay_out(std::uintptr_t at, RankMemory* memory) const {
    const auto take = [&](std::size_t bytes) {
      const std::uintptr_t here = at;
      at += round_up(bytes, kFlagBytes);
      return here;
    };
    const std::size_t topk = staged_tokens_ == 0 ? 0 : num_slots_ / staged_tokens_;
    const std::uintptr_t ids0 = take((1 + num_slots_) * sizeof(std::int32_t));
    const std::uintptr_t ids1 = take((1 + num_slots_) * sizeof(std::int32_t));
    const std::uintptr_t x = take(staged_tokens_ * row_bytes_);
    const std::uintptr_t dy = take(staged_tokens_ * row_bytes_);
    const std::uintptr_t weights = take(staged_tokens_ * topk * sizeof(float));
    const std::uintptr_t slots = take(num_slots_ * row_bytes_);
    const std::uintptr_t dw = take(num_slots_ * sizeof(float));
    const std::uintptr_t flags = take(plan::kNumFlagKinds * static_cast<std::size_t>(num_ranks_) * kFlagBytes);
    if (memory != nullptr) {
      memory->ids[0] = reinterpret_cast<std::int32_t*>(ids0);
      memory->ids[1] = reinterpret_cast<std::int32_t*>(ids1);
      memory->x = reinterpret_cast<bf16*>(x);
      memory->dy = reinterpret_cast<bf16*>(dy);
      memory->weights = reinterpret_cast<float*>(weights);
      memory->slots = reinterpret_cast<bf16*>(slots);
      memory->dw = reinterpret_cast<float*>(dw);
      memory->flags = reinterpret_cast<std::byte*>(flags);
      memory->num_ranks = num_ranks_;
    }
    return at;
  }

  int num_ranks_;
  std::size_t num_slots_;
  std::size_t row_bytes_;
  std::size_t staged_tokens_;
};

inline std::atomic_ref<std::uint32_t> RankMemory::flag(plan::FlagKind kind, int writer) const {
  const int index = static_cast<int>(kind) * num_ranks + writer;
  std::byte* place = flags + static_cast<std::size_t>(index) * SymmetricLayout::kFlagBytes;
  return std::atomic_ref<std::uint32_t>(*reinterpret_cast<std::uint32_t*>(place));
}

}  // namespace clowder::cpu

// Where everything stands in a block's shared memory.
#pragma once

#include "engine/sm90/ptx.cuh"
#include "engine/sm90/tiles.h"
#include "engine/sm90/timeline.h"
#include "plan/task.h"

namespace clowder::sm90 {

// What a block does with one ticket of the cluster.
struct alignas(16) TaskRecord {
  std::int32_t kind;  // plan::TaskKind, or kLeave
  std::int32_t rank_and_flags;
  std::int32_t expert;     // of the rank; E_l is the shared expert
  std::int32_t block;      // row block, or block of tokens
  std::int32_t tile;       // column tile
  std::int32_t first_row;  // of the block, in the schedule or among the tokens
  std::int32_t row_count;  // real rows of the block, 0 for a tile beyond the last
  std::int32_t ring_row;   // of the block's first row

  static constexpr std::int32_t kLeave = -1;
  // Both blocks of the cluster share the activations, and have tiles of their own. Otherwise they share the weights.
  static constexpr std::int32_t kOdd = 1;
  static constexpr std::int32_t kSaved = 2;  // g and u are kept

  static constexpr int kRankShift = 2;

  __device__ int rank() const { return rank_and_flags >> kRankShift; }  // index into the launch's ranks
  __device__ plan::TaskKind task_kind() const { return static_cast<plan::TaskKind>(kind); }
  __device__ bool is_odd() const { return (rank_and_flags & kOdd) != 0; }
  __device__ bool is_saved() const { return (rank_and_flags & kSaved) != 0; }
  // A tile beyond the last one exists for the partner's sake; nothing of it is stored or counted.
  __device__ bool is_real() const { return row_count > 0; }
};
static_assert(sizeof(TaskRecord) == 32);

// A row's results begin so many times 16 bytes after the first row's place; or nowhere, for padding.
inline constexpr std::uint32_t kNowhere = ~0u;

// Results on their way to memory: a box of raw results and one of activated ones, and where the rows of the tile go.
struct Staging {
  alignas(1024) std::byte raw[kBoxBytes];
  std::byte activated[kBoxBytes];
};

struct SharedMemory {
  alignas(1024) std::byte stages[kStages][kStageBytes];  // A, then the two halves of B
  Staging staging[kMathWarps];
  TaskRecord records[kRecords];
  std::uint32_t targets[kRecords][kBlockRows];  // where the rows go, in units of 16 bytes
  // A stage is full when its loads have landed, and empty when every math warp of the cluster has read it.
  std::uint64_t full[kStages];
  std::uint64_t empty[kStages];
  // A record is published to both blocks; its targets are found by the agents; its results are stored by every math
  // warp; it is drained, counted in the leader, when nobody in the cluster needs it any more.
  std::uint64_t published[kRecords];
  std::uint64_t targeted[kRecords];
  std::uint64_t stored[kRecords];
  std::uint64_t drained[kRecords];
  TileEvent* event;  // of the timeline, or null
};
inline constexpr int kSharedBytes = static_cast<int>(sizeof(SharedMemory));
static_assert(kSharedBytes <= 232448);

// Addresses of the above that roles use.
struct SharedAddresses {
  std::uint32_t base;

  __device__ std::uint32_t stage(int s) const { return base + s * kStageBytes; }
  __device__ std::uint32_t staging(int warp) const {
    return base + offsetof(SharedMemory, staging) + warp * sizeof(Staging);
  }
  __device__ std::uint32_t full(int s) const { return base + offsetof(SharedMemory, full) + 8 * s; }
  __device__ std::uint32_t empty(int s) const { return base + offsetof(SharedMemory, empty) + 8 * s; }
  __device__ std::uint32_t record(int i) const { return base + offsetof(SharedMemory, records) + 32 * i; }
  __device__ std::uint32_t published(int i) const { return base + offsetof(SharedMemory, published) + 8 * i; }
  __device__ std::uint32_t targeted(int i) const { return base + offsetof(SharedMemory, targeted) + 8 * i; }
  __device__ std::uint32_t stored(int i) const { return base + offsetof(SharedMemory, stored) + 8 * i; }
  __device__ std::uint32_t drained(int i) const { return base + offsetof(SharedMemory, drained) + 8 * i; }
};

// A place in a ring of barriers, in one register: math warps have none to spare. `parity` is that of the phase that the
// owner waits for next. A consumer's first phase has parity 0, a producer's 1, since everything is empty at first.
template <int kSize>
class RingPlace {
 public:
  __device__ explicit RingPlace(std::uint32_t first_parity) : packed_(first_parity << kParityShift) {}

  __device__ std::uint32_t index() const { return packed_ & ((1u << kParityShift) - 1); }
  __device__ std::uint32_t parity() const { return packed_ >> kParityShift; }
  __device__ void advance() {
    packed_ = index() == kSize - 1 ? (packed_ ^ 1u << kParityShift) - (kSize - 1) : packed_ + 1;
  }
  __device__ std::uint32_t index_before() const { return index() == 0 ? kSize - 1 : index() - 1; }

 private:
  static constexpr int kParityShift = 8;

  std::uint32_t packed_;
};

}  // namespace clowder::sm90

// Storing a tile's results: 64 registers of packed bf16 a thread, 16 rows by 256 columns a math warp, in kSlices slices
// that run behind the matrix instructions of the next tile.
//
// Even slices store the four boxes of 64 columns as they are: of gate and up tiles g and u, which backward needs; of
// down tiles the slots' rows, pushed to the ranks of their tokens; of output tiles the tokens' rows. Odd slices compute
// and store h of gate/up tiles, half a box each.
#pragma once

#include "engine/sm90/records.cuh"
#include "model/activation/dispatch.h"

namespace clowder::sm90 {

// Two matrices of 8 x 8 side by side above two others; this lane's address of matrix row lane % 8, for store_matrices
// and load_matrices. `pair` is the number of 16 columns.
__device__ __forceinline__ std::uint32_t fragment_address(std::uint32_t box, int lane, int pair) {
  return box + lane % 16 * kRowBytes + (((2 * pair + lane / 16) ^ lane % 8) * 16);
}

// Asked for where they are needed, since a math thread has no registers for them.
__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }
__device__ __forceinline__ int math_warp() { return static_cast<int>((threadIdx.x - kWarpgroupThreads) / 32); }

template <class Params, class GatedActivation>
class Drain {
 public:
  using Registers = std::uint32_t[64];

  __device__ Drain(const Params& params, SharedMemory& memory, const SharedAddresses& shared,
                   const GatedActivation& activation)
      : params_(params), memory_(memory), shared_(shared), activation_(activation) {}

  __device__ __forceinline__ bool holds() const { return holds_; }
  __device__ __forceinline__ void hold(const RingPlace<kRecords>& record) {
    held_ = record.index();
    holds_ = true;
  }

  template <int kSlice>
  __device__ __forceinline__ void slice(const Registers& results) {
    const TaskRecord task = record();
    if constexpr (kSlice % 2 == 0) {
      store_raw<kSlice / 2>(task, results);
    } else if (is_up(task)) {
      store_activated<kSlice / 4, kSlice / 2 % 2>(task, results);
    }
  }

  __device__ __forceinline__ void all(const Registers& results) {
    slice<0>(results);
    slice<1>(results);
    slice<2>(results);
    slice<3>(results);
    slice<4>(results);
    slice<5>(results);
    slice<6>(results);
    slice<7>(results);
    finish();
  }

  // Says that the warp's results are there; the feed warp passes it on.
  __device__ __forceinline__ void finish() {
    if (lane() == 0) wait_stores();
    store_nothing(held_);
    holds_ = false;
  }

  // Of a warp all of whose rows are padding.
  __device__ __forceinline__ void store_nothing(std::uint32_t record) const {
    // All lanes' stores come before the signal.
    __syncwarp();
    if (lane() == 0) barrier_arrive(shared_.stored(record));
  }

 private:
  __device__ __forceinline__ std::uint32_t raw_box() const { return shared_.staging(math_warp()); }

  __device__ __forceinline__ TaskRecord record() const { return read_record(shared_, held_); }
  static __device__ __forceinline__ bool is_up(const TaskRecord& task) {
    return task.task_kind() == plan::TaskKind::kUp || task.task_kind() == plan::TaskKind::kSharedUp;
  }
  __device__ __forceinline__ int first_row() const { return math_warp() * kBoxRows; }
  // Bulk stores know no rows but whole boxes; g and u stand without padding, so an expert's last rows go one by one.
  __device__ __forceinline__ bool has_whole_box(const TaskRecord& task) const {
    return task.row_count >= first_row() + kBoxRows;
  }

  // Box `kBox` of 64 columns: registers 16 * kBox and up.
  template <int kBox>
  __device__ __forceinline__ void store_raw(const TaskRecord& task, const Registers& results) {
    const bool up = is_up(task);
    if (up && !task.is_saved()) return;
    if (lane() == 0) wait_stores_read<0>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t* r = results + 16 * kBox + 4 * i;
      store_matrices(fragment_address(raw_box(), lane(), i), r[0], r[1], r[2], r[3]);
    }
    if (up && has_whole_box(task)) {
      fence_proxy_shared();
      __syncwarp();
      if (lane() == 0) {
        store_box(gate_or_up_map<kBox / 2>(task), raw_box(), task.tile * kHalfColumns + kBox % 2 * kBoxColumns,
                  task.first_row + first_row());
        commit_stores();
      }
    } else {
      __syncwarp();
      store_rows<kBox>(task);
    }
  }

  template <int kHalf>
  __device__ __forceinline__ const CUtensorMap* gate_or_up_map(const TaskRecord& task) const {
    const ForwardRank& rank = params_.rank(task.rank());
    const bool shared = task.task_kind() == plan::TaskKind::kSharedUp;
    if (kHalf == 0) return shared ? &rank.shared_gate_store : &rank.gate_store;
    return shared ? &rank.shared_up_store : &rank.up_store;
  }

  // Columns of a matrix that rows go to one by one.
  struct RowTarget {
    bf16* first;          // row 0, column 0
    std::int32_t column;  // of the box
    std::int32_t width;   // columns
  };

  template <int kBox>
  __device__ __forceinline__ RowTarget row_target(const TaskRecord& task) const {
    const ForwardRank& rank = params_.rank(task.rank());
    if (!is_up(task)) {
      bf16* first = task.task_kind() == plan::TaskKind::kDown ? params_.slots_of_rank[0] : rank.out;
      return {first, task.tile * kTileColumns + kBox * kBoxColumns, static_cast<std::int32_t>(params_.hidden)};
    }
    const bool shared = task.task_kind() == plan::TaskKind::kSharedUp;
    const std::int64_t width = shared ? params_.shared_intermediate : params_.intermediate;
    bf16* gate_up = shared ? rank.shared_gate_up : rank.gate_up;
    return {gate_up + kBox / 2 * width, task.tile * kHalfColumns + kBox % 2 * kBoxColumns,
            static_cast<std::int32_t>(width)};
  }

  // The raw box, row by row.
  template <int kBox>
  __device__ __forceinline__ void store_rows(const TaskRecord& task) const {
    const RowTarget target = row_target<kBox>(task);
    const int chunk = lane() % 8;
    const int column = target.column + chunk * 8;
    if (column >= target.width) return;
    const std::uint32_t* rows = memory_.targets[held_] + first_row();
    uint4* first = reinterpret_cast<uint4*>(target.first + column);
    // Four rows at once would take registers.
#pragma unroll 2
    for (int row = lane() / 8; row < kBoxRows; row += 4) {
      const std::uint32_t place = rows[row];
      const uint4 words = load_shared_16(raw_box() + row * kRowBytes + ((chunk ^ row % 8) * 16));
      if (place != kNowhere) first[place] = words;
    }
  }

  // Half `kHalf` of the box of h whose g are registers 16 * kBox and up, and whose u are 32 registers further.
  template <int kBox, int kHalf>
  __device__ __forceinline__ void store_activated(const TaskRecord& task, const Registers& results) {
    const std::uint32_t box = raw_box() + kBoxBytes;
    if (kHalf == 0) {
      if (lane() == 0) wait_stores_read<0>();
      __syncwarp();
    }
#pragma unroll
    for (int i = 2 * kHalf; i < 2 * kHalf + 2; ++i) {
      std::uint32_t h[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        h[j] = activate(results[16 * kBox + 4 * i + j], results[32 + 16 * kBox + 4 * i + j]);
      }
      store_matrices(fragment_address(box, lane(), i), h[0], h[1], h[2], h[3]);
    }
    if (kHalf == 1) {
      fence_proxy_shared();
      __syncwarp();
      if (lane() == 0) {
        const ForwardRank& rank = params_.rank(task.rank());
        const bool shared = task.task_kind() == plan::TaskKind::kSharedUp;
        store_box(shared ? &rank.shared_h_store : &rank.h_store, box, task.tile * kHalfColumns + kBox * kBoxColumns,
                  task.ring_row + first_row());
        commit_stores();
      }
    }
  }

  __device__ __forceinline__ std::uint32_t activate(std::uint32_t gate, std::uint32_t up) const {
    const float2 g = unpack_bf16(gate);
    const float2 u = unpack_bf16(up);
    return pack_bf16(activation_.value(g.x, u.x), activation_.value(g.y, u.y));
  }

  const Params& params_;
  SharedMemory& memory_;
  const SharedAddresses& shared_;
  GatedActivation activation_;
  std::uint32_t held_ = 0;
  bool holds_ = false;
};

}  // namespace clowder::sm90

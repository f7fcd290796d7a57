// Storing a tile's results: 64 registers of packed bf16 a thread, 16 rows by 256 columns a math warp, in kSlices slices
// that run behind the matrix instructions of the next tile.
//
// Even slices store the four boxes of 64 columns as they are: of gate and up tiles g and u, which backward needs; of
// down tiles the slots' rows, pushed to the ranks of their tokens; of output tiles the tokens' rows. Odd slices compute
// and store h of gate/up tiles, half a box each.
#pragma once

#include "engine/sm90/feed.cuh"
#include "model/activation/dispatch.h"

namespace clowder::sm90 {

// Two matrices of 8 x 8 side by side above two others; this lane's address of matrix row lane % 8, for store_matrices
// and load_matrices. `pair` is the number of 16 columns.
__device__ __forceinline__ std::uint32_t fragment_address(std::uint32_t box, int lane, int pair) {
  return box + lane % 16 * kRowBytes + (((2 * pair + lane / 16) ^ lane % 8) * 16);
}

template <class Params, class GatedActivation>
class Drain {
 public:
  using Registers = std::uint32_t[64];

  __device__ Drain(const Params& params, SharedMemory& memory, const SharedAddresses& shared,
                   const GatedActivation& activation, int warp, int lane)
      : params_(params),
        memory_(memory),
        shared_(shared),
        activation_(activation),
        raw_box_(shared_address(memory.staging[warp].raw)),
        warp_(warp),
        lane_(lane) {}

  __device__ __forceinline__ bool holds() const { return held_ >= 0; }
  __device__ __forceinline__ void hold(std::uint32_t record) { held_ = static_cast<int>(record); }

  template <int kSlice>
  __device__ __forceinline__ void slice(const Registers& results) {
    if (kSlice == 0) find_targets();
    if constexpr (kSlice % 2 == 0) {
      store_raw<kSlice / 2>(results);
    } else if (is_up()) {
      store_activated<kSlice / 4, kSlice / 2 % 2>(results);
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

  // Tells whoever waits for the tile that its results are there, and lets go of its record.
  __device__ __forceinline__ void finish() {
    signal(record());
    if (lane_ == 0) release_record(shared_, held_);
    held_ = -1;
  }

  // Of a warp all of whose rows are padding: nothing to store.
  __device__ __forceinline__ void skip(const TaskRecord& record, std::uint32_t index) {
    if (record.is_real()) signal(record);
    if (lane_ == 0) release_record(shared_, index);
  }

 private:
  __device__ __forceinline__ const TaskRecord& record() const { return memory_.records[held_]; }
  __device__ __forceinline__ bool is_up() const {
    return record().task_kind() == plan::TaskKind::kUp || record().task_kind() == plan::TaskKind::kSharedUp;
  }
  __device__ __forceinline__ int first_row() const { return warp_ * kBoxRows; }
  // Bulk stores know no rows but whole boxes; g and u stand without padding, so an expert's last rows go one by one.
  __device__ __forceinline__ bool has_whole_box() const { return record().row_count >= first_row() + kBoxRows; }

  // Where the first column of each of the warp's rows goes.
  __device__ __forceinline__ void find_targets() {
    if (lane_ < kBoxRows) memory_.row_targets[warp_][lane_] = target_of(record(), first_row() + lane_);
    __syncwarp();
  }

  __device__ std::byte* target_of(const TaskRecord& task, int row) const {
    if (row >= task.row_count) return nullptr;
    const ForwardRank& rank = params_.rank(task.rank());
    const std::int64_t global_row = task.first_row + row;
    bf16* target = nullptr;
    switch (task.task_kind()) {
      case plan::TaskKind::kUp:
        if (task.is_saved()) target = rank.gate_up + global_row * 2 * params_.intermediate;
        break;
      case plan::TaskKind::kSharedUp:
        if (task.is_saved()) target = rank.shared_gate_up + global_row * 2 * params_.shared_intermediate;
        break;
      case plan::TaskKind::kDown: {
        const plan::RowSource source = rank.schedule.source(global_row);
        target = params_.slots_of_rank[source.rank] + source.slot * params_.hidden;
        break;
      }
      default:
        target = rank.out + global_row * params_.hidden;
        break;
    }
    return reinterpret_cast<std::byte*>(target);
  }

  // Box `kBox` of 64 columns: registers 16 * kBox and up.
  template <int kBox>
  __device__ __forceinline__ void store_raw(const Registers& results) {
    const TaskRecord& task = record();
    const bool up = is_up();
    if (up && !task.is_saved()) return;
    if (lane_ == 0) wait_stores_read<0>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t* r = results + 16 * kBox + 4 * i;
      store_matrices(fragment_address(raw_box_, lane_, i), r[0], r[1], r[2], r[3]);
    }
    if (up && has_whole_box()) {
      fence_proxy_shared();
      __syncwarp();
      if (lane_ == 0) {
        store_box(gate_or_up_map<kBox / 2>(task), raw_box_, task.tile * kHalfColumns + kBox % 2 * kBoxColumns,
                  task.first_row + first_row());
        commit_stores();
      }
    } else {
      __syncwarp();
      const int width = static_cast<int>(task.task_kind() == plan::TaskKind::kUp         ? params_.intermediate
                                         : task.task_kind() == plan::TaskKind::kSharedUp ? params_.shared_intermediate
                                                                                         : params_.hidden);
      const int column = up ? task.tile * kHalfColumns + kBox % 2 * kBoxColumns : task.tile * kTileColumns + kBox * kBoxColumns;
      store_rows(column, width, up ? kBox / 2 * width : 0);
    }
  }

  template <int kHalf>
  __device__ __forceinline__ const CUtensorMap* gate_or_up_map(const TaskRecord& task) const {
    const ForwardRank& rank = params_.rank(task.rank());
    const bool shared = task.task_kind() == plan::TaskKind::kSharedUp;
    if (kHalf == 0) return shared ? &rank.shared_gate_store : &rank.gate_store;
    return shared ? &rank.shared_up_store : &rank.up_store;
  }

  // The raw box, row by row, to columns `column` and up of a matrix of `width` columns that begins `skipped` columns
  // after the rows' targets.
  __device__ __forceinline__ void store_rows(int column, int width, int skipped) const {
    const int chunk = lane_ % 8;
    if (column + chunk * 8 >= width) return;
    const std::int64_t offset = (std::int64_t{skipped} + column + chunk * 8) * 2;
#pragma unroll
    for (int first = 0; first < kBoxRows; first += 4) {
      const int row = first + lane_ / 8;
      std::byte* target = memory_.row_targets[warp_][row];
      const uint4 words = load_shared_16(raw_box_ + row * kRowBytes + ((chunk ^ row % 8) * 16));
      if (target != nullptr) *reinterpret_cast<uint4*>(target + offset) = words;
    }
  }

  // Half `kHalf` of the box of h whose g are registers 16 * kBox and up, and whose u are 32 registers further.
  template <int kBox, int kHalf>
  __device__ __forceinline__ void store_activated(const Registers& results) {
    const std::uint32_t box = raw_box_ + kBoxBytes;
    if (kHalf == 0) {
      if (lane_ == 0) wait_stores_read<0>();
      __syncwarp();
    }
#pragma unroll
    for (int i = 2 * kHalf; i < 2 * kHalf + 2; ++i) {
      std::uint32_t h[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        h[j] = activate(results[16 * kBox + 4 * i + j], results[32 + 16 * kBox + 4 * i + j]);
      }
      store_matrices(fragment_address(box, lane_, i), h[0], h[1], h[2], h[3]);
    }
    if (kHalf == 1) {
      fence_proxy_shared();
      __syncwarp();
      if (lane_ == 0) {
        const TaskRecord& task = record();
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

  __device__ __forceinline__ void signal(const TaskRecord& task) const {
    const ForwardRank& rank = params_.rank(task.rank());
    const auto add = [&](plan::CounterKind kind, std::int32_t index) {
      add_release(rank.counters[static_cast<int>(kind)] + index, 1);
    };
    // The other lanes' stores are ordered before the signal.
    __syncwarp();
    if (lane_ != 0) return;
    switch (task.task_kind()) {
      case plan::TaskKind::kUp:
      case plan::TaskKind::kSharedUp:
        wait_stores();
        fence_proxy();
        add(task.task_kind() == plan::TaskKind::kUp ? plan::CounterKind::kUp : plan::CounterKind::kSharedUp, task.block);
        break;
      case plan::TaskKind::kDown:
        add(plan::CounterKind::kDown, task.block);
        add(plan::CounterKind::kRemoteWork, 0);
        break;
      default:
        break;
    }
  }

  const Params& params_;
  SharedMemory& memory_;
  const SharedAddresses& shared_;
  GatedActivation activation_;
  std::uint32_t raw_box_;
  int warp_, lane_;
  int held_ = -1;
};

}  // namespace clowder::sm90

// The math warpgroups: 64 rows of a tile each. Matrix instructions of a tile run while the results of the tile before
// leave (drain.cuh).
#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#include "engine/sm90/drain.cuh"
#include "engine/sm90/load.cuh"
#include "engine/sm90/timeline.cuh"

namespace clowder::sm90 {

// 64 x 256 sums of a warpgroup. A thread holds, of rows lane / 4 and lane / 4 + 8 of its warp's 16, two neighbouring
// columns of every 8: element 4 * j + 2 * (row / 8) + (column % 2).
struct Accumulators {
  float value[128];

  // Adds the products of one stage: four instructions of 16 terms. `rows` and `columns` are their descriptors.
  __device__ __forceinline__ void multiply(std::uint64_t rows, std::uint64_t columns, bool starts_at_zero) {
    multiply_16(rows, columns, !starts_at_zero, std::make_index_sequence<128>());
#pragma unroll
    for (int i = 1; i < kStepTerms / 16; ++i) {
      multiply_16(rows + 2 * i, columns + 2 * i, true, std::make_index_sequence<128>());
    }
  }

 private:
  template <std::size_t... kIndex>
  __device__ __forceinline__ void multiply_16(std::uint64_t rows, std::uint64_t columns, bool adds,
                                              std::index_sequence<kIndex...>) {
    using namespace cute::SM90::GMMA;
    MMA_64x256x16_F32BF16BF16_SS<Major::K, Major::K>::fma(rows, columns, value[kIndex]...,
                                                          adds ? ScaleOut::One : ScaleOut::Zero);
  }
};

// Rows of 128 bytes in the 128-byte swizzle, eight of them 1024 bytes apart.
__device__ __forceinline__ std::uint64_t matrix_descriptor(std::uint32_t sixteenths) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  constexpr std::uint64_t kEightRows = std::uint64_t{1024 / 16} << 32;
  constexpr std::uint64_t kUnused = std::uint64_t{1} << 16;
  return kSwizzle128 | kEightRows | kUnused | sixteenths;
}

template <class Params, class GatedActivation>
class MathWarp {
 public:
  __device__ MathWarp(const Params& params, SharedMemory& memory, const SharedAddresses& shared,
                      const GatedActivation& activation, int warp, int lane)
      : params_(params),
        shared_(shared),
        reader_(memory, shared),
        drain_(params, memory, shared, activation, warp, lane),
        rows_(shared.stage(0) / 16 + warp / 4 * (kABytes / kMathWarpgroups / 16)),
        marks_(memory, warp == 0 && lane == 0),
        stage_(0),
        warp_(warp),
        lane_(lane) {}

  __device__ __forceinline__ void run() {
    for (;; reader_.advance()) {
      marks_.mark(&TileEvent::waits);
      // A task that is not there yet may wait for what this warp still holds.
      if (drain_.holds() && !(reader_.is_published() && hides_stores(reader_.record()))) drain_.all(results_);
      reader_.wait();
      const TaskRecord& record = reader_.record();
      if (record.kind == TaskRecord::kLeave) break;
      marks_.mark(&TileEvent::starts);
      const plan::TaskKind kind = record.task_kind();
      const int steps = steps_of(params_, kind);
      if (!has_rows(record)) {
        for (int i = steps + sum_steps_of(params_, kind) * (kTileColumns / kBoxColumns); i > 0; --i) skip_stage();
        drain_.skip(record, reader_.index());
        continue;
      }
      multiply(steps);
      if (kind == plan::TaskKind::kOut) sum_slots(record, steps == 0);
      marks_.end(params_.timeline, record);
#pragma unroll
      for (int i = 0; i < 64; ++i) results_[i] = pack_bf16(sums_.value[2 * i], sums_.value[2 * i + 1]);
      drain_.hold(reader_.index());
    }
    wait_stores();
  }

 private:
  // 64 rows of nothing but padding are not computed.
  __device__ __forceinline__ bool has_rows(const TaskRecord& record) const {
    return record.row_count > warp_ / 4 * (kBlockRows / kMathWarpgroups);
  }
  __device__ __forceinline__ bool hides_stores(const TaskRecord& record) const {
    return record.kind != TaskRecord::kLeave && has_rows(record) &&
           steps_of(params_, record.task_kind()) > kSignalStep;
  }

  __device__ __forceinline__ void wait_stage() { barrier_wait(shared_.full(stage_.index), stage_.parity); }
  // Both blocks may have loaded this stage of both.
  __device__ __forceinline__ void release_stage(std::uint32_t stage) {
    if (lane_ < kClusterBlocks) barrier_arrive_at(shared_.empty(stage), lane_);
  }
  __device__ __forceinline__ void skip_stage() {
    wait_stage();
    release_stage(stage_.index);
    stage_.advance();
  }

  __device__ __forceinline__ void issue(bool is_first) {
    wait_stage();
    // Gathered rows were written by ordinary copies.
    fence_proxy_shared();
    matrix_fence();
    const std::uint32_t stage = stage_.index * (kStageBytes / 16);
    sums_.multiply(matrix_descriptor(rows_ + stage), matrix_descriptor(shared_.base / 16 + kABytes / 16 + stage), is_first);
    matrix_commit();
  }
  __device__ __forceinline__ std::uint32_t stage_before() const { return (stage_.index + kStages - 1) % kStages; }
  // The step before the one just issued has ended.
  __device__ __forceinline__ void release_previous() {
    matrix_wait<1>();
    release_stage(stage_before());
  }
  __device__ __forceinline__ void step() {
    issue(false);
    release_previous();
    stage_.advance();
  }
  template <int kSlice>
  __device__ __forceinline__ void step_and_drain() {
    issue(false);
    drain_.template slice<kSlice>(results_);
    release_previous();
    stage_.advance();
  }
  __device__ __forceinline__ void end_steps() {
    matrix_wait<0>();
#pragma unroll
    for (int i = 0; i < 128; ++i) asm volatile("" : "+f"(sums_.value[i])::"memory");
    release_stage(stage_before());
  }

  // Holds results of the tile before only if there are more than kSignalStep steps to hide their stores behind.
  __device__ __forceinline__ void multiply(int steps) {
    if (steps == 0) return;
    wait_stage();
    marks_.mark(&TileEvent::loaded);
    issue(true);
    int done = 1;
    if (drain_.holds()) {
      drain_.template slice<0>(results_);
      stage_.advance();
      step_and_drain<1>();
      step_and_drain<2>();
      step_and_drain<3>();
      step_and_drain<4>();
      step_and_drain<5>();
      step_and_drain<6>();
      step_and_drain<7>();
      for (done = kSlices; done < kSignalStep; ++done) step();
      drain_.finish();
    } else {
      stage_.advance();
    }
    for (; done < steps; ++done) step();
    end_steps();
  }

  // Adds the slots of the block's tokens, each times its weight, in the order of slots. Slots without a route hold
  // anything and are not looked at. Without a shared expert there is nothing to add to.
  __device__ __forceinline__ void sum_slots(const TaskRecord& record, bool from_zero) {
    const ForwardRank& rank = params_.rank(record.rank());
    const int row = warp_ * kBoxRows + lane_ / 4;
    const int tokens[2] = {record.first_row + row, record.first_row + row + 8};
    std::uint32_t masks[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      masks[i] = row + 8 * i < record.row_count ? static_cast<std::uint32_t>(rank.schedule.route_mask[tokens[i]]) : 0;
    }
    sum_part<0>(rank, tokens, masks, from_zero);
    sum_part<1>(rank, tokens, masks, from_zero);
    sum_part<2>(rank, tokens, masks, from_zero);
    sum_part<3>(rank, tokens, masks, from_zero);
  }

  // 64 columns of it.
  template <int kPart>
  __device__ __forceinline__ void sum_part(const ForwardRank& rank, const int (&tokens)[2],
                                           const std::uint32_t (&masks)[2], bool from_zero) {
    for (int slot = 0; slot < params_.topk; ++slot) {
      bool has_route[2];
      float weight[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        has_route[i] = (masks[i] >> slot & 1) != 0;
        weight[i] = has_route[i] ? rank.topk_weights[std::int64_t{tokens[i]} * params_.topk + slot] : 0.0f;
      }
      wait_stage();
      const std::uint32_t box = shared_.stage(stage_.index) + warp_ * kBoxBytes;
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const uint4 y = load_matrices(fragment_address(box, lane_, pair));
        float* sums = sums_.value + 32 * kPart + 8 * pair;
        add(sums, y.x, weight[0], has_route[0], from_zero);
        add(sums + 2, y.y, weight[1], has_route[1], from_zero);
        add(sums + 4, y.z, weight[0], has_route[0], from_zero);
        add(sums + 6, y.w, weight[1], has_route[1], from_zero);
      }
      __syncwarp();
      release_stage(stage_.index);
      stage_.advance();
      from_zero = false;
    }
  }

  static __device__ __forceinline__ void add(float* sums, std::uint32_t pair, float weight, bool has_route,
                                             bool from_zero) {
    const float2 y = unpack_bf16(pair);
    sums[0] = from_zero ? 0.0f : sums[0];
    sums[1] = from_zero ? 0.0f : sums[1];
    sums[0] = has_route ? __fmaf_rn(weight, y.x, sums[0]) : sums[0];
    sums[1] = has_route ? __fmaf_rn(weight, y.y, sums[1]) : sums[1];
  }

  const Params& params_;
  const SharedAddresses& shared_;
  RecordReader reader_;
  Drain<Params, GatedActivation> drain_;
  std::uint32_t rows_;  // of the first stage, in units of 16 bytes
  TileMarks marks_;
  RingPlace<kStages> stage_;
  int warp_, lane_;
  Accumulators sums_;
  std::uint32_t results_[64];
};

}  // namespace clowder::sm90

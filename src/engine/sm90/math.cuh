// The math warpgroups: 64 rows of a tile each. Matrix instructions of a tile run while the results of the tile before
// leave (drain.cuh).
#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#include "engine/sm90/drain.cuh"
#include "engine/sm90/load.cuh"
#include "engine/sm90/timeline.cuh"

namespace clowder::sm90 {

// A value that all lanes hold, as one that the compiler knows to be so: it moves what follows to the uniform registers.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// An operand of rows of 128 bytes in the 128-byte swizzle, eight of them 1024 bytes apart. The upper word is a
// constant.
__device__ __forceinline__ std::uint64_t matrix_descriptor(std::uint32_t sixteenths) {
  constexpr std::uint32_t kSwizzle128 = 1u << 30;
  constexpr std::uint32_t kEightRows = 1024 / 16;
  constexpr std::uint32_t kUnused = 1u << 16;
  return std::uint64_t{kSwizzle128 | kEightRows} << 32 | (kUnused + sixteenths);
}

// 64 x 256 sums of a warpgroup. A thread holds, of rows lane / 4 and lane / 4 + 8 of its warp's 16, two neighbouring
// columns of every 8: element 4 * j + 2 * (row / 8) + (column % 2).
struct Accumulators {
  float value[128];

  // Adds the products of one stage: four instructions of 16 terms, 32 bytes further each. Operands stand at so many
  // times 16 bytes in shared memory.
  __device__ __forceinline__ void multiply(std::uint32_t rows, std::uint32_t columns, bool starts_at_zero) {
#pragma unroll
    for (int i = 0; i < kStepTerms / 16; ++i) {
      multiply_16(matrix_descriptor(rows + 2 * i), matrix_descriptor(columns + 2 * i), i > 0 || !starts_at_zero,
                  std::make_index_sequence<128>());
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

template <class Params, class GatedActivation>
class MathWarp {
 public:
  __device__ MathWarp(const Params& params, SharedMemory& memory, const SharedAddresses& shared,
                      const GatedActivation& activation)
      : params_(params),
        shared_(shared),
        half_(uniform(math_warp() / 4)),
        record_(0),
        drain_(params, memory, shared, activation),
        marks_(memory),
        stage_(0) {}

  __device__ __forceinline__ void run() {
    // Of the next task, if it is there and hides stores; otherwise 0.
    int steps = 0;
    for (;; record_.advance()) {
      marks_.mark(&TileEvent::waits);
      if (steps == 0) {
        // The task may wait for what this warp still holds.
        if (drain_.holds()) drain_.all(results_);
        // The agents saw it published.
        barrier_wait(shared_.targeted(record_.index()), record_.parity());
        const TaskRecord record = read_record(shared_, record_.index());
        if (record.kind == TaskRecord::kLeave) break;
        if (!has_rows(record)) {
          skip_stages(record);
          drain_.store_nothing(record_.index());
          continue;
        }
        steps = uniform(steps_of(params_, record.task_kind()));
      }
      marks_.mark(&TileEvent::starts);
      steps = multiply(steps);
      const TaskRecord record = read_record(shared_, record_.index());
      if (record.task_kind() == plan::TaskKind::kOut) sum_slots(record);
      marks_.end(params_.timeline, record);
#pragma unroll
      for (int i = 0; i < 64; ++i) results_[i] = pack_bf16(sums_.value[2 * i], sums_.value[2 * i + 1]);
      drain_.hold(record_);
    }
    wait_stores();
  }

 private:
  // 64 rows of nothing but padding are not computed.
  __device__ __forceinline__ bool has_rows(const TaskRecord& record) const {
    return record.row_count > half_ * (kBlockRows / kMathWarpgroups);
  }
  // How many steps of the next task will hide stores: 0 if it is not there, has no rows for this warp or too few steps.
  __device__ __forceinline__ int look_ahead() const {
    RingPlace<kRecords> next = record_;
    next.advance();
    if (!barrier_try_wait(shared_.targeted(next.index()), next.parity())) return 0;
    const TaskRecord record = read_record(shared_, next.index());
    if (record.kind == TaskRecord::kLeave || !has_rows(record)) return 0;
    const int steps = uniform(steps_of(params_, record.task_kind()));
    return steps > kSignalStep ? steps : 0;
  }

  __device__ __forceinline__ void wait_stage() { barrier_wait(shared_.full(stage_.index()), stage_.parity()); }
  // Both blocks may have loaded this stage of both.
  __device__ __forceinline__ void release_stage(std::uint32_t stage) {
    if (lane() < kClusterBlocks) barrier_arrive_at(shared_.empty(stage), lane());
  }
  __device__ __forceinline__ void skip_stages(const TaskRecord& record) {
    const plan::TaskKind kind = record.task_kind();
    for (int i = steps_of(params_, kind) + sum_steps_of(params_, kind) * (kTileColumns / kBoxColumns); i > 0; --i) {
      wait_stage();
      release_stage(stage_.index());
      stage_.advance();
    }
  }

  __device__ __forceinline__ void issue(bool is_first) {
    wait_stage();
    // Gathered rows were written by ordinary copies.
    fence_proxy_shared();
    matrix_fence();
    const std::uint32_t stage = shared_.stage(stage_.index()) / 16;
    sums_.multiply(stage + half_ * (kABytes / kMathWarpgroups / 16), stage + kABytes / 16, is_first);
    matrix_commit();
  }
  // The step before the one just issued has ended.
  __device__ __forceinline__ void release_previous() {
    matrix_wait<1>();
    release_stage(stage_.index_before());
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
    release_stage(stage_.index_before());
  }

  // Holds results of the tile before only if there are more than kSignalStep steps to hide their stores behind. Looks
  // ahead while the last step runs.
  __device__ __forceinline__ int multiply(int steps) {
    if (steps == 0) return 0;
    wait_stage();
    marks_.mark(&TileEvent::loaded);
    issue(true);
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
      for (int i = kSlices; i < kSignalStep; ++i) step();
      drain_.finish();
      steps -= kSignalStep;
    } else {
      stage_.advance();
      --steps;
    }
    for (; steps > 0; --steps) step();
    steps = look_ahead();
    end_steps();
    return steps;
  }

  // Adds the slots of the block's tokens, each times its weight, in the order of slots. Slots without a route hold
  // anything and are not looked at. Without a shared expert there is nothing to add to.
  __device__ __forceinline__ void sum_slots(const TaskRecord& record) {
    bool from_zero = steps_of(params_, record.task_kind()) == 0;
    const ForwardRank& rank = params_.rank(record.rank());
    const int row = math_warp() * kBoxRows + lane() / 4;
    const int tokens[2] = {record.first_row + row, record.first_row + row + 8};
    std::uint32_t masks[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      masks[i] = row + 8 * i < record.row_count ? static_cast<std::uint32_t>(rank.schedule.route_mask[tokens[i]]) : 0;
    }
    for (int slot = 0; slot < params_.topk; ++slot, from_zero = false) {
      bool has_route[2];
      float weight[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        has_route[i] = (masks[i] >> slot & 1) != 0;
        weight[i] = has_route[i] ? rank.topk_weights[std::int64_t{tokens[i]} * params_.topk + slot] : 0.0f;
      }
#pragma unroll
      for (int part = 0; part < kTileColumns / kBoxColumns; ++part) {
        sum_part(sums_.value + 32 * part, weight, has_route, from_zero);
      }
    }
  }

  // 64 columns of one slot.
  __device__ __forceinline__ void sum_part(float* sums, const float (&weight)[2], const bool (&has_route)[2],
                                           bool from_zero) {
    wait_stage();
    const std::uint32_t box = shared_.stage(stage_.index()) + math_warp() * kBoxBytes;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const uint4 y = load_matrices(fragment_address(box, lane(), pair));
      add(sums + 8 * pair, y.x, weight[0], has_route[0], from_zero);
      add(sums + 8 * pair + 2, y.y, weight[1], has_route[1], from_zero);
      add(sums + 8 * pair + 4, y.z, weight[0], has_route[0], from_zero);
      add(sums + 8 * pair + 6, y.w, weight[1], has_route[1], from_zero);
    }
    __syncwarp();
    release_stage(stage_.index());
    stage_.advance();
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
  int half_;  // of the block's rows
  RingPlace<kRecords> record_;
  Drain<Params, GatedActivation> drain_;
  TileMarks marks_;
  RingPlace<kStages> stage_;
  Accumulators sums_;
  std::uint32_t results_[64];
};

}  // namespace clowder::sm90

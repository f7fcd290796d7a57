// The load warp: one thread that brings the operands of every step into the stages by bulk tensor copies.
//
// Of two row blocks that share their weights, each block loads its own rows and one half of the weight tile, which goes
// to both. Of two tiles that share their rows it is the other way round. Rows of x that are gathered come from the
// agents instead (gather.cuh).
#pragma once

#include "engine/sm90/pace.cuh"
#include "engine/sm90/records.cuh"

namespace clowder::sm90 {

__device__ __forceinline__ int num_steps(std::int64_t terms) {
  return static_cast<int>((terms + kStepTerms - 1) / kStepTerms);
}

template <class Params>
__device__ int steps_of(const Params& params, plan::TaskKind kind) {
  switch (kind) {
    case plan::TaskKind::kUp:
    case plan::TaskKind::kSharedUp:
      return num_steps(params.hidden);
    case plan::TaskKind::kDown:
      return num_steps(params.intermediate);
    default:
      return num_steps(params.shared_intermediate);
  }
}

// A token block's out also walks every slot of its tokens, 64 columns at a time.
template <class Params>
__device__ int sum_steps_of(const Params& params, plan::TaskKind kind) {
  return kind == plan::TaskKind::kOut ? params.topk : 0;
}

// Elements from row to row of what a tile's results are stored to.
template <class Params>
__device__ std::int64_t row_pitch(const Params& params, plan::TaskKind kind) {
  switch (kind) {
    case plan::TaskKind::kUp:
      return 2 * params.intermediate;
    case plan::TaskKind::kSharedUp:
      return 2 * params.shared_intermediate;
    default:
      return params.hidden;
  }
}

// What a block loads of a GEMM tile. The tile's columns are two halves, gate and up or neighbours.
struct TileOperands {
  const CUtensorMap* rows;  // null: gathered
  const CUtensorMap* halves[2];
  int first_column[2];
};

template <class Params>
__device__ TileOperands operands_of(const Params& params, const TaskRecord& record) {
  const ForwardRank& rank = params.rank(record.rank());
  const WeightMaps& weights = rank.weights[record.expert];
  const int column = record.tile * kTileColumns;
  switch (record.task_kind()) {
    case plan::TaskKind::kUp:
    case plan::TaskKind::kSharedUp:
      return {nullptr, {&weights.w1, &weights.w3}, {column / 2, column / 2}};
    case plan::TaskKind::kDown:
      return {&rank.h_load, {&weights.w2, &weights.w2}, {column, column + kHalfColumns}};
    default:
      return {&rank.shared_h_load, {&weights.w2, &weights.w2}, {column, column + kHalfColumns}};
  }
}

template <class Params>
class Loader {
 public:
  __device__ Loader(const Params& params, const SharedMemory& memory, const SharedAddresses& shared)
      : params_(params),
        shared_(shared),
        reader_(memory, shared),
        pacer_(params.progress, static_cast<std::int32_t>(gridDim.x) / kClusterBlocks),
        block_(cluster_rank()),
        stage_(1) {}

  // One thread.
  __device__ void run() {
    for (;; reader_.advance()) {
      reader_.wait();
      const TaskRecord record = reader_.record();
      if (record.kind == TaskRecord::kLeave) return;
      // What the tasks before have written by ordinary stores is read by copies now.
      fence_proxy();
      const int steps = steps_of(params_, record.task_kind());
      if (steps > 0) load_tile(record, steps);
      if (sum_steps_of(params_, record.task_kind()) > 0) load_slots(record);
      release_record(shared_, reader_.index());
    }
  }

 private:
  static constexpr std::uint16_t kWholeCluster = (1 << kClusterBlocks) - 1;

  __device__ void load_tile(const TaskRecord& record, int steps) {
    const TileOperands operands = operands_of(params_, record);
    acquire_tensor_map(operands.halves[0]);
    acquire_tensor_map(operands.halves[1]);
    if (record.is_odd()) {
      load_shared_rows(operands, record.ring_row, steps);
    } else {
      load_shared_weights(operands, record.ring_row, steps);
    }
  }

  // Two row blocks, one tile.
  __device__ void load_shared_weights(const TileOperands& operands, int first_row, int steps) {
    const CUtensorMap* half = block_ == 0 ? operands.halves[0] : operands.halves[1];
    const int column = block_ == 0 ? operands.first_column[0] : operands.first_column[1];
    for (int term = 0; term < steps * kStepTerms; term += kStepTerms, stage_.advance()) {
      const std::uint32_t full = next_stage(operands.rows);
      const std::uint32_t rows = shared_.stage(stage_.index());
      if (operands.rows != nullptr) {
        load_box(rows, operands.rows, full, term, first_row);
        load_box(rows + kABytes / 2, operands.rows, full, term, first_row + kBlockRows / 2);
      }
      load_box_multicast(rows + kABytes + block_ * kHalfBBytes, half, full, term, column, kWholeCluster);
      pace(steps);
    }
  }

  // One row block, two tiles.
  __device__ void load_shared_rows(const TileOperands& operands, int first_row, int steps) {
    for (int term = 0; term < steps * kStepTerms; term += kStepTerms, stage_.advance()) {
      const std::uint32_t full = next_stage(operands.rows);
      const std::uint32_t rows = shared_.stage(stage_.index());
      if (operands.rows != nullptr) {
        load_box_multicast(rows + block_ * (kABytes / 2), operands.rows, full, term,
                           first_row + static_cast<int>(block_) * (kBlockRows / 2), kWholeCluster);
      }
      load_box(rows + kABytes, operands.halves[0], full, term, operands.first_column[0]);
      load_box(rows + kABytes + kHalfBBytes, operands.halves[1], full, term, operands.first_column[1]);
      pace(steps);
    }
  }

  __device__ void pace(int steps) {
    if (block_ == 0 && num_steps(params_.hidden) >= kPacedSteps) pacer_.step(steps >= kPacedSteps);
  }

  // Waits until the next stage is empty, says what will land in it, and returns its barrier.
  __device__ std::uint32_t next_stage(const CUtensorMap* rows) {
    barrier_wait(shared_.empty(stage_.index()), stage_.parity());
    const std::uint32_t full = shared_.full(stage_.index());
    barrier_expect(full, rows == nullptr ? 2 * kHalfBBytes : kStageBytes);
    if (rows != nullptr) barrier_arrive_many(full, kAgentThreads);
    return full;
  }

  // Every slot of the block's tokens in order, the tile's columns 64 at a time: neighbours in memory follow each other.
  __device__ void load_slots(const TaskRecord& record) {
    const CUtensorMap* slots = &params_.rank(record.rank()).slots;
    for (int slot = 0; slot < params_.topk; ++slot) {
      for (int part = 0; part < kTileColumns / kBoxColumns; ++part) {
        const int column = record.tile * kTileColumns + part * kBoxColumns;
        barrier_wait(shared_.empty(stage_.index()), stage_.parity());
        const std::uint32_t full = shared_.full(stage_.index());
        barrier_expect(full, kABytes);
        barrier_arrive_many(full, kAgentThreads);
        load_box_3d(shared_.stage(stage_.index()), slots, full, column, slot, record.first_row);
        stage_.advance();
      }
    }
  }

  const Params& params_;
  SharedAddresses shared_;
  RecordReader reader_;
  Pacer pacer_;
  std::uint32_t block_;
  RingPlace<kStages> stage_;
};

}  // namespace clowder::sm90

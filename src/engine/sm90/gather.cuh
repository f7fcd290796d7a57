// The gather warps: rows of x, wherever they stand, into the stages of gate/up tiles. With one rank there is nothing to
// pull, and no ring of x: the first read of a row is the one that the matrix instructions use.
#pragma once

#include "engine/sm90/load.cuh"

namespace clowder::sm90 {

template <class Params>
class Gatherer {
 public:
  __device__ Gatherer(const Params& params, const SharedMemory& memory, const SharedAddresses& shared, int warp, int lane)
      : params_(params), shared_(shared), reader_(memory, shared), stage_(1), warp_(warp), lane_(lane) {}

  // The whole warp, one of kAgentWarps.
  __device__ void run() {
    for (;; reader_.advance()) {
      reader_.wait();
      const TaskRecord record = reader_.record();
      __syncwarp();
      if (lane_ == 0) release_record(shared_, reader_.index());
      if (record.kind == TaskRecord::kLeave) return;
      const plan::TaskKind kind = record.task_kind();
      const int steps = steps_of(params_, kind);
      if (kind == plan::TaskKind::kUp || kind == plan::TaskKind::kSharedUp) {
        gather(record, steps);
      } else {
        skip(steps + kTileColumns / kBoxColumns * sum_steps_of(params_, kind));
      }
    }
  }

 private:
  // In a turn all agents together copy 8 rows, the period of the swizzle; a row by 8 lanes.
  static constexpr int kTurnRows = 4 * kAgentWarps;
  static constexpr int kTurns = kBlockRows / kTurnRows;
  static_assert(kTurnRows == 8);

  // The token whose x is row `row` of the block, or -1 for padding.
  __device__ int token_of(const TaskRecord& record, int row) const {
    if (row >= record.row_count) return -1;
    if (record.task_kind() == plan::TaskKind::kSharedUp) return record.first_row + row;
    return params_.rank(record.rank()).schedule.row_source[record.first_row + row] / params_.topk;
  }

  __device__ void gather(const TaskRecord& record, int steps) {
    const int first_row = warp_ * 4 + lane_ / 8;
    const std::uint32_t place = first_row * kRowBytes + (lane_ ^ first_row) % 8 * 16;
    int tokens[kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) tokens[turn] = token_of(record, first_row + turn * kTurnRows);
    const std::byte* first = reinterpret_cast<const std::byte*>(params_.rank(record.rank()).x);
    const std::uint32_t row_bytes = static_cast<std::uint32_t>(params_.hidden) * 2;
    std::uint32_t column = lane_ % 8 * 16;
    for (int step = 0; step < steps; ++step, column += kRowBytes) {
      barrier_wait(shared_.empty(stage_.index), stage_.parity);
      const std::uint32_t to = shared_.stage(stage_.index) + place;
      // The last step of an H that is no multiple of kStepTerms ends in zeros.
      const bool is_inside = column < row_bytes;
      const std::byte* x = is_inside ? first + column : first;
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const std::uint32_t token = tokens[turn] < 0 ? 0 : tokens[turn];
        copy_16_bytes(to + turn * kTurnRows * kRowBytes, x + std::uint64_t{token} * row_bytes,
                      is_inside && tokens[turn] >= 0 ? 16 : 0);
      }
      arrive_after_copies(shared_.full(stage_.index));
      stage_.advance();
    }
  }

  // Stages that are filled by bulk copies alone. They are waited for all the same: a parity tells only neighbouring
  // phases apart.
  __device__ void skip(int steps) {
    for (int step = 0; step < steps; ++step) {
      barrier_wait(shared_.empty(stage_.index), stage_.parity);
      stage_.advance();
    }
  }

  const Params& params_;
  SharedAddresses shared_;
  RecordReader reader_;
  RingPlace<kStages> stage_;
  int warp_, lane_;
};

}  // namespace clowder::sm90

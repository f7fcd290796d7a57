// The agents of one rank. They gather rows of x, wherever they stand, into the stages of gate/up tiles: there is
// nothing to pull, and no ring of x. For down tiles they look up where the rows go.
#pragma once

#include "engine/sm90/load.cuh"

namespace clowder::sm90 {

template <class Params>
class Gatherer {
 public:
  __device__ Gatherer(const Params& params, SharedMemory& memory, const SharedAddresses& shared, int warp, int lane)
      : params_(params),
        memory_(memory),
        shared_(shared),
        reader_(memory, shared),
        stage_(1),
        warp_(warp),
        lane_(lane) {}

  // The whole warp, one of kAgentWarps.
  __device__ void run() {
    for (;; reader_.advance()) {
      reader_.wait();
      const TaskRecord record = reader_.record();
      const plan::TaskKind kind = record.task_kind();
      const bool leaves = record.kind == TaskRecord::kLeave;
      if (!leaves) find_targets(record);
      __syncwarp();
      if (lane_ == 0) barrier_arrive(shared_.targeted(reader_.index()));
      if (leaves) return;
      if (lane_ == 0) release_record(shared_, reader_.index());
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
  // The rows that a warp copies, as many as a lane looks up for all.
  static constexpr int kLookUps = kBlockRows / kAgentWarps / 32;

  // Where the block's rows go: those of a down tile to their slots, others one after the other.
  __device__ void find_targets(const TaskRecord& record) {
    const plan::TaskKind kind = record.task_kind();
    const std::int32_t* sources = params_.rank(record.rank()).schedule.row_source + record.first_row;
    const auto pitch = static_cast<std::uint32_t>(row_pitch(params_, kind) / 8);
#pragma unroll 1
    for (int row = warp_ * 32 + lane_; row < kBlockRows; row += kAgentThreads) {
      std::uint32_t target = kNowhere;
      if (row < record.row_count) {
        const int index = kind == plan::TaskKind::kDown ? sources[row] : record.first_row + row;
        target = static_cast<std::uint32_t>(index) * pitch;
      }
      memory_.targets[reader_.index()][row] = target;
    }
  }

  // The token whose x is row `row` of the block, or -1 for padding.
  __device__ int token_of(const TaskRecord& record, int row) const {
    if (row >= record.row_count) return -1;
    if (record.task_kind() == plan::TaskKind::kSharedUp) return record.first_row + row;
    return params_.rank(record.rank()).schedule.row_source[record.first_row + row] / params_.topk;
  }

  __device__ void gather(const TaskRecord& record, int steps) {
    // Turn t copies the warp's rows 4 * t and up. Each is looked up once, by lane 4 * t % 32 and up.
    int looked_up[kLookUps];
#pragma unroll
    for (int i = 0; i < kLookUps; ++i) {
      const int row_of_warp = 32 * i + lane_;
      looked_up[i] = token_of(record, row_of_warp / 4 * kTurnRows + warp_ * 4 + row_of_warp % 4);
    }
    std::uint32_t rows[kTurns];  // of x, in units of 16 bytes
    std::uint32_t is_real = 0;   // bit t: the row of turn t is no padding
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int token = __shfl_sync(~0u, looked_up[turn / 8], turn % 8 * 4 + lane_ / 8);
      is_real |= (token >= 0 ? 1u : 0u) << turn;
      rows[turn] = static_cast<std::uint32_t>(max(token, 0)) * static_cast<std::uint32_t>(params_.hidden / 8);
    }
    const int first_row = warp_ * 4 + lane_ / 8;
    const std::uint32_t place = first_row * kRowBytes + (lane_ ^ first_row) % 8 * 16;
    const bf16* x = params_.rank(record.rank()).x;
    for (int column = lane_ % 8 * 8; steps > 0; --steps, column += kStepTerms) {
      barrier_wait(shared_.empty(stage_.index()), stage_.parity());
      const std::uint32_t to = shared_.stage(stage_.index()) + place;
      // The last step of an H that is no multiple of kStepTerms ends in zeros.
      const bool is_inside = column < params_.hidden;
      const std::uint32_t is_read = is_inside ? is_real : 0;
      const bf16* from = x + (is_inside ? column : 0);
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        copy_16_bytes(to + turn * kTurnRows * kRowBytes, from, rows[turn], (is_read >> turn & 1) * 16);
      }
      arrive_after_copies(shared_.full(stage_.index()));
      stage_.advance();
    }
  }

  // Stages that are filled by bulk copies alone. They are waited for all the same: a parity tells only neighbouring
  // phases apart.
  __device__ void skip(int steps) {
    for (int step = 0; step < steps; ++step) {
      barrier_wait(shared_.empty(stage_.index()), stage_.parity());
      stage_.advance();
    }
  }

  const Params& params_;
  SharedMemory& memory_;
  SharedAddresses shared_;
  RecordReader reader_;
  RingPlace<kStages> stage_;
  int warp_, lane_;
};

}  // namespace clowder::sm90

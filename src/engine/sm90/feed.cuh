// How tasks reach a cluster. The feed warp of the leading block takes a ticket, waits for what the plan says its task
// needs, and publishes a record to both blocks. So no load is issued for a task that may never start, and one word
// tells the cluster to leave.
#pragma once

#include "engine/sm90/records.cuh"
#include "engine/sm90/signal.cuh"
#include "engine/sm90/wait.cuh"
#include "plan/cluster.h"
#include "plan/dependencies.h"

namespace clowder::sm90 {

template <class Params>
class Feed {
 public:
  __device__ Feed(const Params& params, const SharedMemory& memory, const SharedAddresses& shared, int lane)
      : params_(params), shared_(shared), signaller_(params, memory, shared, lane), lane_(lane), queue_(*params.math) {}

  // The whole warp. Whatever it waits for, it keeps passing on results: others, and this feed's own next task, may wait
  // for them.
  __device__ void run() {
    RingPlace<kRecords> place(1);
    for (bool goes_on = true; goes_on; place.advance()) {
      while (!__all_sync(~0u, barrier_try_wait(shared_.drained(place.index()), place.parity()))) pass_on();
      TaskRecord record{};
      goes_on = next(record);
      if (!goes_on) record.kind = TaskRecord::kLeave;
      if (lane_ < kClusterBlocks) publish(record, place.index());
      __syncwarp();
      if (goes_on) ++num_unstored_;
    }
    while (num_unstored_ > 0) pass_on();
  }

 private:
  __device__ void pass_on() {
    if (num_unstored_ > 0 && signaller_.poll()) --num_unstored_;
  }

  // Lane b < kClusterBlocks gets the record of block b. False when there is no task left or a wait was given up.
  __device__ bool next(TaskRecord& record) {
    std::int32_t ticket = 0;
    if (lane_ == 0) ticket = atomicAdd(params_.next_ticket, 1);
    ticket = __shfl_sync(~0u, ticket, 0);
    if (ticket >= queue_.num_tickets) return false;
    const plan::Segment& segment = find_segment(ticket);
    plan::Task task;
    if (lane_ < kClusterBlocks) {
      task = make_record(segment, ticket - static_cast<std::int32_t>(segment.first_ticket), record);
    }
    return wait_for_inputs(record, task);
  }

  // Every lane waits for what the task of its record needs. False: somebody gave up.
  __device__ bool wait_for_inputs(const TaskRecord& record, const plan::Task& task) {
    Patience patience(params_.watch);
    for (;;) {
      const Needed needed = lane_ < kClusterBlocks && record.is_real()
                                ? find_missing(params_, params_.rank(record.rank()), task)
                                : Needed{};
      if (__all_sync(~0u, needed.is_there)) return true;
      pass_on();
      const bool goes_on = patience.goes_on();
      if (!goes_on && patience.is_late() && !needed.is_there) {
        give_up(params_.watch, params_.shape.pass, *params_.rank(record.rank()).schedule.rank, task.kind(), needed);
      }
      if (!__all_sync(~0u, goes_on)) return false;
    }
  }

  // Tickets of one feed only grow, so the search starts where it last ended, 32 segments at a time.
  __device__ const plan::Segment& find_segment(std::int32_t ticket) {
    for (;; cursor_ += 32) {
      const std::int64_t mine = cursor_ + lane_;
      const bool has_begun = mine < queue_.num_segments && queue_.segments[mine].first_ticket <= ticket;
      const int begun = __popc(__ballot_sync(~0u, has_begun));
      if (begun == 32) continue;
      if (begun == 0) {
        --cursor_;  // the last segment of the 32 before
      } else {
        cursor_ += begun - 1;
      }
      return queue_.segments[cursor_];
    }
  }

  __device__ plan::Task make_record(const plan::Segment& segment, std::int32_t index, TaskRecord& record) const {
    const plan::ClusterTask pair = plan::find_cluster_task(segment.num_blocks, segment.num_tiles, index);
    plan::Task task;
    task.segment = &segment;
    task.block = segment.first_block + pair.block + (pair.is_odd ? 0 : lane_);
    task.tile = pair.tile + (pair.is_odd ? lane_ : 0);
    record.kind = static_cast<std::int32_t>(segment.kind);
    record.rank_and_flags = segment.rank << TaskRecord::kRankShift | (pair.is_odd ? TaskRecord::kOdd : 0);
    record.block = task.block;
    record.tile = task.tile;
    fill_rows(segment, task, record);
    // The partner's half of the loads is needed all the same.
    if (task.tile >= segment.num_tiles) record.row_count = 0;
    return task;
  }

  __device__ void fill_rows(const plan::Segment& segment, const plan::Task& task, TaskRecord& record) const {
    const ForwardRank& rank = params_.rank(segment.rank);
    const plan::RankPass& pass = *rank.pass;
    record.expert = segment.expert;
    if (segment.expert < 0) {
      record.expert = params_.num_experts;
      record.first_row = task.block * kBlockRows;
      record.row_count = min(kBlockRows, pass.num_tokens - record.first_row);
      record.ring_row = record.first_row;
      if (rank.shared_gate_up != nullptr) record.rank_and_flags |= TaskRecord::kSaved;
    } else {
      record.first_row = pass.blocks.block_row_begin[task.block];
      record.row_count = pass.blocks.block_row_count[task.block];
      record.ring_row = task.block % params_.shape.ring.ring_blocks * kBlockRows;
      if (plan::is_saved(params_.shape, pass, task.block)) record.rank_and_flags |= TaskRecord::kSaved;
    }
  }

  __device__ void publish(const TaskRecord& record, std::uint32_t index) const {
    const std::uint32_t place = shared_.record(index);
    store_at(place, lane_, make_int4(record.kind, record.rank_and_flags, record.expert, record.block));
    store_at(place + 16, lane_, make_int4(record.tile, record.first_row, record.row_count, record.ring_row));
    barrier_release_at(shared_.published(index), lane_);
  }

  const Params& params_;
  const SharedAddresses& shared_;
  Signaller<Params> signaller_;
  int num_unstored_ = 0;  // published tasks whose results have not been passed on
  int lane_;
  plan::Queue queue_;
  std::int64_t cursor_ = 0;
};

}  // namespace clowder::sm90

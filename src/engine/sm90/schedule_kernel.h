// The schedule of a step, on the device: the same words as plan::build_schedule writes, bit for bit.
//
// Positions of the canonical order are dealt to kScheduleTiles tiles in contiguous runs. One kernel counts every
// expert's slots in each tile; the next one sums the tiles before its own, and places its slots in order: a warp walks
// a run of them 32 at a time, and equal experts among the 32 find their order by matching.
#pragma once

#include <cstdint>

#include "plan/schedule.h"

namespace clowder::sm90 {

// One rank's ids as it has published them.
struct RankIds {
  const void* topk_idx;        // [tokens, K]
  const std::int32_t* tokens;  // null: `num_tokens` says
  std::int32_t num_tokens;
  std::int32_t is_int64;
};

struct ScheduleParams {
  plan::ScheduleShape shape;
  const RankIds* ids;              // [R], on the device
  RankIds own_ids;                 // where R = 1, instead
  std::int32_t* const* schedules;  // [local ranks], on the device
  std::int32_t* own_schedule;      // where there is one local rank, instead
  const std::int32_t* ranks;       // [local ranks] their numbers in the group, on the device
  std::int32_t own_rank;
  std::int32_t num_local_ranks;
  std::int32_t* histogram;  // [kScheduleTiles][E + 1]: slots of each expert, and bad ids
};

inline constexpr int kScheduleTiles = 128;

// How much shared memory the kernels need, which grows with the number of experts.
std::int64_t schedule_shared_bytes(const plan::ScheduleShape& shape);
inline constexpr std::int64_t kMaxScheduleSharedBytes = 220 * 1024;

void launch_schedule(const ScheduleParams& params, void* stream);

}  // namespace clowder::sm90

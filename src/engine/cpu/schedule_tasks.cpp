#include "engine/cpu/schedule_tasks.h"

#include <limits>

namespace clowder::cpu {
namespace {

// Ids that int32 cannot hold are out of range for any layer, and stay so.
std::int32_t narrow(std::int64_t id) {
  constexpr std::int32_t kOutOfRange = std::numeric_limits<std::int32_t>::max();
  return id == static_cast<std::int32_t>(id) ? static_cast<std::int32_t>(id) : kOutOfRange;
}

}  // namespace

void ScheduleTasks::execute(const plan::Task& task, const Scratch&) {
  const auto index = static_cast<std::size_t>(task.rank());
  if (task.kind() == plan::TaskKind::kStageIds) {
    stage_ids(ranks_[index], ids_[index]);
  } else {
    build(ranks_[index], schedules_[index]);
  }
}

void ScheduleTasks::stage_ids(int rank, const ExpertIds& ids) const {
  std::int32_t* staged = memory_[static_cast<std::size_t>(rank)].ids[buffer_];
  *staged++ = static_cast<std::int32_t>(ids.tokens);
  const std::int64_t count = ids.tokens * shape_.topk;
  for (std::int64_t i = 0; i < count; ++i) {
    staged[i] = ids.is_int64 ? narrow(static_cast<const std::int64_t*>(ids.topk_idx)[i])
                             : static_cast<const std::int32_t*>(ids.topk_idx)[i];
  }
}

void ScheduleTasks::build(int rank, std::int32_t* schedule) const {
  std::vector<const std::int32_t*> ids;
  std::vector<std::int32_t> tokens;
  for (const RankMemory& peer : memory_) {
    tokens.push_back(*peer.ids[buffer_]);
    ids.push_back(peer.ids[buffer_] + 1);
  }
  plan::Schedule view = plan::view_schedule(shape_, schedule);
  plan::build_schedule(rank, {ids.data(), tokens.data()}, view);
}

}  // namespace clowder::cpu

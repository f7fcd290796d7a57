#include "clowder/layer.h"
#include "model/shape.h"
#include "plan/schedule.h"

namespace clowder {

ScheduleSummary summarise(const LayerShape& shape, int num_ranks, const std::int32_t* schedule) {
  validate(shape, num_ranks);
  if (schedule == nullptr) {
    throw Error(ErrorCode::kArgument, "schedule: a null pointer, must be what build_schedule wrote");
  }
  const plan::ConstSchedule view = plan::view_schedule(plan::make_schedule_shape(shape, num_ranks), schedule);
  if (*view.signature != view.shape.signature()) {
    throw Error(ErrorCode::kArgument, "schedule: not one of this layer, must be what build_schedule wrote");
  }
  ScheduleSummary summary;
  summary.skipped_ids = *view.skipped_ids;
  summary.rows = view.num_rows();
  summary.tokens.assign(view.tokens, view.tokens + num_ranks);
  summary.expert_counts.assign(view.expert_counts, view.expert_counts + shape.num_experts);
  return summary;
}

}  // namespace clowder

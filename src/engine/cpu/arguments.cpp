#include "engine/cpu/arguments.h"

#include "engine/arguments.h"

namespace clowder::cpu {

plan::ConstSchedule checked_schedule(const plan::ScheduleShape& shape, int rank, const std::int32_t* words) {
  const plan::ConstSchedule schedule = plan::view_schedule(shape, words);
  if (*schedule.signature != shape.signature() || *schedule.rank != rank) {
    refuse_argument("schedule", "not one of this layer and of rank " + std::to_string(rank),
                    "what build_schedule wrote");
  }
  return schedule;
}

bool has_tokens(const plan::ConstSchedule& schedule) { return schedule.tokens[*schedule.rank] > 0; }

void check_token_tensors(const ForwardInputs& inputs, const plan::ConstSchedule& schedule) {
  if (!has_tokens(schedule)) return;
  require_pointer(inputs.x, "x");
  require_pointer(inputs.topk_weights, "topk_weights");
  require_pointer(inputs.out, "out");
}

void check_token_tensors(const LayerShape& shape, const BackwardInputs& inputs, const plan::ConstSchedule& schedule) {
  if (!has_tokens(schedule)) return;
  require_pointer(inputs.x, "x");
  require_pointer(inputs.dout, "dout");
  require_pointer(inputs.topk_weights, "topk_weights");
  if (shape.shared_intermediate > 0) require_pointer(inputs.saved.shared_gate_up, "saved.shared_gate_up");
}

}  // namespace clowder::cpu

// Checks of what a caller passes that read host memory, schedules above all. All throw Error(kArgument) that names the
// argument, what it was and what it may be.
#pragma once

#include "clowder/layer.h"
#include "plan/schedule.h"

namespace clowder::cpu {

// The schedule of local rank `rank`, if `words` holds one of this layer.
plan::ConstSchedule checked_schedule(const plan::ScheduleShape& shape, int rank, const std::int32_t* words);

bool has_tokens(const plan::ConstSchedule& schedule);

// A rank that holds no tokens may leave their tensors null.
void check_token_tensors(const ForwardInputs& inputs, const plan::ConstSchedule& schedule);
void check_token_tensors(const LayerShape& shape, const BackwardInputs& inputs, const plan::ConstSchedule& schedule);

}  // namespace clowder::cpu

// Checks of what a caller passes, before anything is launched. All throw Error(kArgument) that names the argument, what
// it was and what it may be.
#pragma once

#include <vector>

#include "clowder/layer.h"
#include "plan/pass.h"
#include "plan/schedule.h"

namespace clowder::cpu {

// Fills in defaults and checks what was given.
WorkspaceOptions resolve_options(const LayerShape& shape, int num_ranks, const WorkspaceOptions& options);

void check_ids(const LayerShape& shape, std::size_t num_local_ranks, const std::vector<ExpertIds>& ids,
               const std::vector<std::int32_t*>& schedules);

// The schedule of local rank `rank`, if `words` holds one of this layer.
plan::ConstSchedule checked_schedule(const plan::ScheduleShape& shape, int rank, const std::int32_t* words);

void check_forward(const LayerShape& shape, const ForwardInputs& inputs, const plan::ConstSchedule& schedule);
void check_backward(const LayerShape& shape, const BackwardInputs& inputs, const plan::ConstSchedule& schedule);

// Whether forward saves, or backward finds, g and u: all ranks of a launch alike.
bool are_rows_saved(const std::vector<const SavedTensors*>& saved, std::int64_t saved_rows, bool keep_x);

// The gradients that the callers of all local ranks want. With peers in other launches, what is pushed to them counts
// as wanted: only they know.
plan::Needs find_needs(const LayerShape& shape, const std::vector<BackwardInputs>& ranks,
                       const std::vector<plan::ConstSchedule>& schedules, bool has_distant_peers);

void check_count(const char* name, std::size_t count, std::size_t num_local_ranks);

}  // namespace clowder::cpu

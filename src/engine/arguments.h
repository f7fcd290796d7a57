// Checks of what a caller passes, before anything is launched, that read no memory behind a pointer: they hold for the
// memory of any device. All throw Error(kArgument) that names the argument, what it was and what it may be.
#pragma once

#include <string>
#include <vector>

#include "clowder/layer.h"
#include "plan/pass.h"

namespace clowder {

[[noreturn]] void refuse_argument(const std::string& name, const std::string& was, const std::string& may_be);
void require_pointer(const void* pointer, const char* name);

// A group of a user's own may be anything.
void check_group(const Group* group);
// Rank `rank`'s part of what a group allocated.
std::byte* checked_base(const SymmetricMemory* memory, int rank);

// The numbers of an engine that decide on options.
struct EngineLimits {
  std::int32_t block_rows = 0;
  std::int64_t chunk_rows = 0;  // by default
  std::int32_t blocks = 0;      // by default
  plan::TileCounts tiles;
};

// Fills in defaults and checks what was given.
WorkspaceOptions resolve_options(const LayerShape& shape, int num_ranks, const WorkspaceOptions& options,
                                 const EngineLimits& limits);

void check_ids(const LayerShape& shape, const Group& group, const std::vector<ExpertIds>& ids,
               const std::vector<std::int32_t*>& schedules);
void check_forward(const LayerShape& shape, const Group& group, const std::vector<ForwardInputs>& ranks);
void check_backward(const LayerShape& shape, const Group& group, const std::vector<BackwardInputs>& ranks,
                    GradientMode mode);

// Whether forward saves, or backward finds, g and u: all ranks of a launch alike.
template <class Inputs>
bool are_rows_saved(const std::vector<Inputs>& ranks, const WorkspaceOptions& options);

// The gradients that the callers of all local ranks want. A rank without use for a gradient of its tokens, has_use[i]
// being false, may leave it null. With peers in other launches, what is pushed to them counts as wanted: only they
// know.
plan::Needs find_needs(const LayerShape& shape, const Group& group, const std::vector<BackwardInputs>& ranks,
                       const std::vector<bool>& has_use);

}  // namespace clowder

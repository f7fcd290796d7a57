// Checks of a layer's shape, and the few numbers that follow from it.
#pragma once

#include "clowder/types.h"

namespace clowder {

inline constexpr std::int32_t kMaxTopk = 16;

// Throws Error(kArgument) that names the offending argument. `num_ranks` is the EP size.
void validate(const LayerShape& shape, int num_ranks);

inline std::int32_t experts_per_rank(const LayerShape& shape, int num_ranks) { return shape.num_experts / num_ranks; }

}  // namespace clowder

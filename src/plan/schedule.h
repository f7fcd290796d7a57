// The schedule of one rank: which rows its experts receive, in canonical order. It is built once a step from every
// rank's topk_idx and serves forward, recompute and backward. Nothing in it depends on tuning (rings, chunks, tiles),
// so it is what a layer saves.
//
// Rows are unpadded: an expert's rows are contiguous, and row_source has one entry a real row. Padding to row blocks is
// arithmetic (blocks.h).
#pragma once

#include <cstdint>

#include "clowder/types.h"
#include "model/canonical_order.h"
#include "model/host_device.h"

namespace clowder::plan {

struct ScheduleShape {
  std::int32_t num_ranks = 1;
  std::int32_t num_experts = 0;  // over all ranks
  std::int32_t topk = 0;
  std::int32_t max_tokens = 0;  // per rank

  CLOWDER_HD std::int32_t experts_per_rank() const { return num_experts / num_ranks; }
  CLOWDER_HD std::int64_t slots_per_rank() const { return std::int64_t{max_tokens} * topk; }
  // Every slot of every rank may be routed to one rank.
  CLOWDER_HD std::int64_t max_rows() const { return num_ranks * slots_per_rank(); }
  // Length of the flat int32 buffer that holds a schedule.
  CLOWDER_HD std::int64_t words() const {
    return 3 + num_ranks + num_experts + experts_per_rank() + 1 + max_tokens + max_rows();
  }
  // Tells schedules of other shapes, and memory that holds none, apart from this shape's.
  CLOWDER_HD std::int32_t signature() const {
    std::uint32_t hash = 0x636c6f77u;
    const std::int32_t numbers[] = {num_ranks, num_experts, topk, max_tokens};
    for (const std::int32_t number : numbers) {
      hash = (hash ^ static_cast<std::uint32_t>(number)) * 0x01000193u;
    }
    return static_cast<std::int32_t>(hash >> 1);
  }
};

inline ScheduleShape make_schedule_shape(const LayerShape& shape, int num_ranks) {
  return {num_ranks, shape.num_experts, shape.topk, static_cast<std::int32_t>(shape.max_tokens)};
}

// A row's origin: the slot (token * K + slot) of a source rank.
struct RowSource {
  std::int32_t rank;
  std::int32_t slot;
};

// A view of the flat buffer. `Word` is std::int32_t or const std::int32_t.
template <class Word>
struct BasicScheduleView {
  ScheduleShape shape;
  Word* signature;         // [1] of the shape
  Word* skipped_ids;       // [1] slots of all ranks whose id is neither -1 nor in [0, E)
  Word* rank;              // [1] whose schedule this is
  Word* tokens;            // [R] tokens of each rank
  Word* expert_counts;     // [E] rows of each global expert
  Word* expert_row_begin;  // [E_l + 1] first row of each local expert
  Word* route_mask;        // [max_tokens] bit k set: slot k of this rank's own token has a valid route
  Word* row_source;        // [max_rows] source rank * (max_tokens * K) + token * K + slot

  CLOWDER_HD std::int32_t num_rows() const { return expert_row_begin[shape.experts_per_rank()]; }

  CLOWDER_HD RowSource source(std::int64_t row) const {
    // row_source counts all ranks' slots in 32 bits, and a GPU divides those much faster than 64.
    const auto per_rank = static_cast<std::int32_t>(shape.slots_per_rank());
    return RowSource{row_source[row] / per_rank, row_source[row] % per_rank};
  }

  CLOWDER_HD bool has_route(std::int64_t token, std::int32_t slot) const {
    return (static_cast<std::uint32_t>(route_mask[token]) >> slot & 1u) != 0;
  }
};

using Schedule = BasicScheduleView<std::int32_t>;
using ConstSchedule = BasicScheduleView<const std::int32_t>;

// Lays the view over `words`, a buffer of shape.words() entries.
template <class Word>
CLOWDER_HD inline BasicScheduleView<Word> view_schedule(const ScheduleShape& shape, Word* words) {
  BasicScheduleView<Word> view;
  view.shape = shape;
  view.signature = words;
  view.skipped_ids = words + 1;
  view.rank = words + 2;
  view.tokens = words + 3;
  view.expert_counts = view.tokens + shape.num_ranks;
  view.expert_row_begin = view.expert_counts + shape.num_experts;
  view.route_mask = view.expert_row_begin + shape.experts_per_rank() + 1;
  view.row_source = view.route_mask + shape.max_tokens;
  return view;
}

CLOWDER_HD inline bool is_expert(std::int32_t id, std::int32_t num_experts) { return id >= 0 && id < num_experts; }

// The ids that the ranks exchange.
struct ExchangedIds {
  const std::int32_t* const* topk_idx;  // [R] each [T_r, K]
  const std::int32_t* tokens;           // [R]
};

// Calls visit(rank, token, slot, id) for every slot of the global batch in canonical order.
template <class Visit>
CLOWDER_HD inline void for_each_slot(const ScheduleShape& shape, const ExchangedIds& ids, Visit&& visit) {
  std::int64_t total = 0;
  for (std::int32_t r = 0; r < shape.num_ranks; ++r) total += ids.tokens[r];
  const std::int64_t positions = canonical_positions(total);
  for (std::int64_t position = 0; position < positions; ++position) {
    std::int64_t token = canonical_token(position, total);
    if (token >= total) continue;
    std::int32_t rank = 0;
    while (token >= ids.tokens[rank]) token -= ids.tokens[rank++];
    for (std::int32_t slot = 0; slot < shape.topk; ++slot) {
      visit(rank, static_cast<std::int32_t>(token), slot, ids.topk_idx[rank][token * shape.topk + slot]);
    }
  }
}

// Builds rank's schedule: count, prefix sum, placement. Every entry that is read later is written; the tails of
// route_mask and row_source stay as they were.
CLOWDER_HD inline void build_schedule(std::int32_t rank, const ExchangedIds& ids, Schedule& schedule) {
  const ScheduleShape& shape = schedule.shape;
  const std::int32_t local_experts = shape.experts_per_rank();
  const std::int32_t first_expert = rank * local_experts;

  *schedule.signature = shape.signature();
  *schedule.rank = rank;
  *schedule.skipped_ids = 0;
  for (std::int32_t r = 0; r < shape.num_ranks; ++r) schedule.tokens[r] = ids.tokens[r];
  for (std::int32_t e = 0; e < shape.num_experts; ++e) schedule.expert_counts[e] = 0;
  for (std::int32_t t = 0; t < ids.tokens[rank]; ++t) schedule.route_mask[t] = 0;

  for_each_slot(shape, ids, [&](std::int32_t source, std::int32_t token, std::int32_t slot, std::int32_t id) {
    if (is_expert(id, shape.num_experts)) {
      ++schedule.expert_counts[id];
      if (source == rank) schedule.route_mask[token] |= 1 << slot;
    } else if (id != -1) {
      ++*schedule.skipped_ids;
    }
  });

  // expert_row_begin[e + 1] first serves as the cursor of expert e, and ends as its end.
  std::int32_t row = 0;
  schedule.expert_row_begin[0] = 0;
  for (std::int32_t e = 0; e < local_experts; ++e) {
    schedule.expert_row_begin[e + 1] = row;
    row += schedule.expert_counts[first_expert + e];
  }
  for_each_slot(shape, ids, [&](std::int32_t source, std::int32_t token, std::int32_t slot, std::int32_t id) {
    if (!is_expert(id, shape.num_experts)) return;
    const std::int32_t e = id - first_expert;
    if (e < 0 || e >= local_experts) return;
    schedule.row_source[schedule.expert_row_begin[e + 1]++] =
        static_cast<std::int32_t>(source * shape.slots_per_rank() + std::int64_t{token} * shape.topk + slot);
  });
}

}  // namespace clowder::plan

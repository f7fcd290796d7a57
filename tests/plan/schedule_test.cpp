// The schedule against a builder of its own kind, and its independence of the number of ranks.
#include "plan/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <vector>

#include "random.h"
#include "random_plan.h"
#include "test_scale.h"

namespace clowder::plan::explore {
namespace {

constexpr std::int32_t kUntouched = INT32_MIN / 2;

struct GlobalSlot {
  std::int32_t rank;
  std::int32_t token;  // of its rank
  std::int32_t slot;
  std::int64_t global_token;
  std::int32_t id;
};

// Canonical order by sorting: tokens of one position within their shards stand together, shard by shard.
std::vector<GlobalSlot> naive_order(const ScheduleShape& shape, const Routing& routing) {
  std::vector<GlobalSlot> slots;
  std::int64_t global_token = 0;
  for (std::int32_t rank = 0; rank < shape.num_ranks; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    for (std::int32_t token = 0; token < routing.tokens[r]; ++token, ++global_token) {
      for (std::int32_t k = 0; k < shape.topk; ++k) {
        slots.push_back(
            {rank, token, k, global_token, routing.topk_idx[r][static_cast<std::size_t>(token * shape.topk + k)]});
      }
    }
  }
  const std::int64_t shard = std::max<std::int64_t>(1, (global_token + 63) / 64);
  std::stable_sort(slots.begin(), slots.end(), [&](const GlobalSlot& a, const GlobalSlot& b) {
    return std::make_tuple(a.global_token % shard, a.global_token / shard) <
           std::make_tuple(b.global_token % shard, b.global_token / shard);
  });
  return slots;
}

std::vector<std::int32_t> build(const ScheduleShape& shape, const Routing& routing, std::int32_t rank) {
  std::vector<std::int32_t> words(static_cast<std::size_t>(shape.words()), kUntouched);
  std::vector<const std::int32_t*> ids;
  for (const std::vector<std::int32_t>& of_rank : routing.topk_idx) ids.push_back(of_rank.data());
  Schedule schedule = view_schedule(shape, words.data());
  build_schedule(rank, ExchangedIds{ids.data(), routing.tokens.data()}, schedule);
  return words;
}

std::vector<std::int32_t> naive_build(const ScheduleShape& shape, const Routing& routing, std::int32_t rank) {
  std::vector<std::int32_t> words(static_cast<std::size_t>(shape.words()), kUntouched);
  const Schedule schedule = view_schedule(shape, words.data());
  const std::vector<GlobalSlot> slots = naive_order(shape, routing);
  *schedule.signature = shape.signature();
  *schedule.rank = rank;
  *schedule.skipped_ids = static_cast<std::int32_t>(std::count_if(
      slots.begin(), slots.end(), [&](const auto& slot) { return slot.id < -1 || slot.id >= shape.num_experts; }));
  std::copy(routing.tokens.begin(), routing.tokens.end(), schedule.tokens);
  std::int32_t row = 0;
  for (std::int32_t expert = 0; expert < shape.num_experts; ++expert) {
    const bool is_local = expert / shape.experts_per_rank() == rank;
    if (is_local) schedule.expert_row_begin[expert % shape.experts_per_rank()] = row;
    schedule.expert_counts[expert] = 0;
    for (const GlobalSlot& slot : slots) {
      if (slot.id != expert) continue;
      ++schedule.expert_counts[expert];
      if (!is_local) continue;
      schedule.row_source[row++] = slot.rank * shape.max_tokens * shape.topk + slot.token * shape.topk + slot.slot;
    }
  }
  schedule.expert_row_begin[shape.experts_per_rank()] = row;
  for (std::int32_t token = 0; token < routing.tokens[static_cast<std::size_t>(rank)]; ++token) {
    schedule.route_mask[token] = 0;
  }
  for (const GlobalSlot& slot : slots) {
    if (slot.rank == rank && slot.id >= 0 && slot.id < shape.num_experts) {
      schedule.route_mask[slot.token] |= static_cast<std::int32_t>(1u << slot.slot);
    }
  }
  return words;
}

TEST(ScheduleView, FillsItsBuffer) {
  const ScheduleShape shape{4, 12, 3, 5};
  std::vector<std::int32_t> words(static_cast<std::size_t>(shape.words()));
  const Schedule schedule = view_schedule(shape, words.data());
  EXPECT_EQ(schedule.row_source + shape.max_rows(), words.data() + words.size());
}

// Any two shapes of a few hundred, and memory without a schedule.
TEST(ScheduleShape, SignaturesTellShapesApart) {
  std::set<std::int32_t> signatures = {0, -1};
  std::size_t shapes = 2;
  for (const std::int32_t ranks : {1, 2, 4, 8}) {
    for (const std::int32_t experts : {8, 16, 64}) {
      for (const std::int32_t topk : {1, 2, 8}) {
        for (const std::int32_t max_tokens : {0, 1, 128, 4096, 4097}) {
          signatures.insert(ScheduleShape{ranks, experts, topk, max_tokens}.signature());
          ++shapes;
        }
      }
    }
  }
  EXPECT_EQ(signatures.size(), shapes);
}

TEST(BuildSchedule, AgreesWithNaiveBuilder) {
  const std::uint64_t plans = scaled<std::uint64_t>(2000, 200);
  for (std::uint64_t seed = 1; seed <= plans; ++seed) {
    const PlanSpec spec = random_plan(seed);
    const std::int32_t rank = static_cast<std::int32_t>(seed) % spec.schedule.num_ranks;
    for (const Routing& routing : spec.steps) {
      ASSERT_EQ(build(spec.schedule, routing, rank), naive_build(spec.schedule, routing, rank)) << describe(spec);
    }
  }
}

// More tokens than shards, so that positions are skipped within shards.
TEST(BuildSchedule, AgreesWithNaiveBuilderOnManyTokens) {
  Random random(7);
  for (const std::int32_t tokens : {1, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 300}) {
    const ScheduleShape shape{2, 6, 2, tokens};
    Routing routing;
    routing.tokens = {tokens, random.between(0, tokens)};
    for (const std::int32_t count : routing.tokens) {
      std::vector<std::int32_t>& ids = routing.topk_idx.emplace_back(static_cast<std::size_t>(count * shape.topk));
      for (std::int32_t& id : ids) id = random.between(-2, shape.num_experts);
    }
    EXPECT_EQ(build(shape, routing, 0), naive_build(shape, routing, 0)) << tokens;
    EXPECT_EQ(build(shape, routing, 1), naive_build(shape, routing, 1)) << tokens;
  }
}

TEST(BuildSchedule, TakesTheMostSlots) {
  const ScheduleShape shape{1, 32, 32, 3};
  Routing routing;
  routing.tokens = {3};
  routing.topk_idx.resize(1);
  for (std::int32_t slot = 0; slot < 96; ++slot) routing.topk_idx[0].push_back(slot % 5 == 0 ? -1 : slot % 32);
  EXPECT_EQ(build(shape, routing, 0), naive_build(shape, routing, 0));
}

// Splits a global batch over ranks at random places.
Routing split(Random& random, const std::vector<std::int32_t>& ids, std::int32_t topk, std::int32_t num_ranks) {
  const auto tokens = static_cast<std::int32_t>(ids.size()) / topk;
  std::vector<std::int32_t> bounds = {0, tokens};
  for (std::int32_t rank = 1; rank < num_ranks; ++rank) bounds.push_back(random.between(0, tokens));
  std::sort(bounds.begin(), bounds.end());
  Routing routing;
  for (std::size_t rank = 0; rank + 1 < bounds.size(); ++rank) {
    routing.tokens.push_back(bounds[rank + 1] - bounds[rank]);
    routing.topk_idx.emplace_back(ids.begin() + bounds[rank] * topk, ids.begin() + bounds[rank + 1] * topk);
  }
  return routing;
}

// All experts' rows, rank by rank, as (global token, slot).
std::vector<std::int64_t> rows_of_all_ranks(const ScheduleShape& shape, const Routing& routing) {
  std::vector<std::int64_t> rows;
  for (std::int32_t rank = 0; rank < shape.num_ranks; ++rank) {
    std::vector<std::int32_t> words = build(shape, routing, rank);
    const Schedule schedule = view_schedule(shape, words.data());
    for (std::int32_t row = 0; row < schedule.num_rows(); ++row) {
      const RowSource source = schedule.source(row);
      std::int64_t first_token = 0;
      for (std::int32_t r = 0; r < source.rank; ++r) first_token += routing.tokens[static_cast<std::size_t>(r)];
      rows.push_back(first_token * shape.topk + source.slot);
    }
  }
  return rows;
}

TEST(BuildSchedule, OrdersRowsAlikeForAnyNumberOfRanks) {
  Random random(11);
  constexpr std::int32_t kExperts = 24;
  const int batches = scaled(60, 10);
  for (int batch = 0; batch < batches; ++batch) {
    const std::int32_t topk = random.between(1, 4);
    const std::int32_t tokens = random.between(0, 200);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens * topk));
    for (std::int32_t& id : ids) id = random.between(-1, kExperts);
    const ScheduleShape whole{1, kExperts, topk, tokens};
    const std::vector<std::int64_t> expected = rows_of_all_ranks(whole, split(random, ids, topk, 1));
    for (const std::int32_t num_ranks : {2, 3, 4, 6, 8, 12, 24}) {
      const ScheduleShape shape{num_ranks, kExperts, topk, tokens};
      ASSERT_EQ(rows_of_all_ranks(shape, split(random, ids, topk, num_ranks)), expected) << num_ranks << " ranks";
    }
  }
}

}  // namespace
}  // namespace clowder::plan::explore

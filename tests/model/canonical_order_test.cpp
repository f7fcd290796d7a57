#include "model/canonical_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <tuple>
#include <vector>

#include "plan/schedule.h"

namespace clowder {
namespace {

std::vector<std::int64_t> walk(std::int64_t tokens) {
  std::vector<std::int64_t> order;
  for (std::int64_t position = 0; position < canonical_positions(tokens); ++position) {
    const std::int64_t token = canonical_token(position, tokens);
    if (token < tokens) order.push_back(token);
  }
  return order;
}

TEST(CanonicalOrder, VisitsEveryTokenOnce) {
  for (std::int64_t tokens : {0, 1, 2, 63, 64, 65, 127, 128, 1000, 4097, 100000}) {
    std::vector<std::int64_t> order = walk(tokens);
    ASSERT_EQ(static_cast<std::int64_t>(order.size()), tokens);
    std::sort(order.begin(), order.end());
    for (std::int64_t token = 0; token < tokens; ++token) ASSERT_EQ(order[token], token);
  }
}

TEST(CanonicalOrder, InterleavesSixtyFourShards) {
  const std::vector<std::int64_t> order = walk(6400);
  for (std::int64_t position = 0; position < 6400; ++position) {
    ASSERT_EQ(order[position], position % 64 * 100 + position / 64);
  }
}

// The same global batch, split over ranks in any way, is walked in the same order.
TEST(CanonicalOrder, DoesNotDependOnTheRanks) {
  std::mt19937 random(4);
  for (int round = 0; round < 50; ++round) {
    const std::int32_t tokens = static_cast<std::int32_t>(random() % 500);
    const std::int32_t topk = 1 + static_cast<std::int32_t>(random() % 3);
    std::vector<std::int32_t> ids(tokens * topk);
    for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random() % 8);

    std::vector<std::tuple<std::int64_t, int, int>> first;
    for (const std::int32_t ranks : {1, 2, 4, 8}) {
      std::vector<std::int32_t> counts(ranks), starts(ranks);
      std::vector<const std::int32_t*> pointers(ranks);
      std::int32_t start = 0;
      for (std::int32_t r = 0; r < ranks; ++r) {
        const std::int32_t left = tokens - start;
        counts[r] = r == ranks - 1 ? left : static_cast<std::int32_t>(random() % (left + 1));
        starts[r] = start;
        pointers[r] = ids.data() + start * topk;
        start += counts[r];
      }
      const plan::ScheduleShape shape{ranks, 8, topk, tokens};
      std::vector<std::tuple<std::int64_t, int, int>> visits;
      plan::for_each_slot(shape, {pointers.data(), counts.data()}, [&](int rank, int token, int slot, int id) {
        visits.emplace_back(starts[rank] + token, slot, id);
      });
      ASSERT_EQ(static_cast<std::int32_t>(visits.size()), tokens * topk);
      if (ranks == 1) first = visits;
      ASSERT_EQ(visits, first) << ranks << " ranks";
    }
  }
}

}  // namespace
}  // namespace clowder

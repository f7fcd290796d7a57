// What holds for every plan without running it: exhaustively over small sizes, at random over large ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "launch_plan.h"
#include "mutants.h"
#include "plan/dependencies.h"
#include "random.h"
#include "test_scale.h"

namespace clowder::plan::explore {
namespace {

using Counts = std::vector<std::int32_t>;

// A schedule that has only what plans are made of: the rows of each local expert, and the rank's tokens.
class FakeSchedule {
 public:
  FakeSchedule(std::int32_t rank, std::int32_t num_ranks, std::int32_t tokens, const Counts& expert_rows) {
    const auto local_experts = static_cast<std::int32_t>(expert_rows.size());
    shape_ = ScheduleShape{num_ranks, num_ranks * local_experts, 1, 0};
    words_.resize(static_cast<std::size_t>(shape_.words()), 0);
    const Schedule schedule = view_schedule(shape_, words_.data());
    *schedule.rank = rank;
    schedule.tokens[rank] = tokens;
    std::partial_sum(expert_rows.begin(), expert_rows.end(), schedule.expert_row_begin + 1);
  }
  ConstSchedule view() const { return view_schedule(shape_, words_.data()); }

 private:
  ScheduleShape shape_;
  std::vector<std::int32_t> words_;
};

struct Case {
  PassShape shape;
  std::vector<Counts> expert_rows;  // of each rank of the launch
  std::int32_t tokens = 3;
};

std::string describe(const Case& test_case) {
  std::ostringstream text;
  const PassShape& shape = test_case.shape;
  text << (shape.pass == Pass::kForward ? "forward" : "backward") << ", ring " << shape.ring.ring_blocks << ", chunk "
       << shape.ring.chunk_blocks << ", block_rows " << shape.ring.block_rows << ", saved " << shape.saved_rows
       << ", needs " << shape.needs.x << shape.needs.topk_weights << shape.needs.w13 << shape.needs.w2 << ", rows";
  for (const Counts& rank : test_case.expert_rows) {
    text << " [";
    for (const std::int32_t rows : rank) text << ' ' << rows;
    text << " ]";
  }
  return text.str();
}

void build(const Case& test_case, LaunchPlan& plan, EditShape edit_emission = nullptr) {
  const auto num_ranks = static_cast<std::int32_t>(test_case.expert_rows.size());
  std::vector<FakeSchedule> schedules;
  std::vector<ConstSchedule> views;
  for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
    schedules.emplace_back(rank, num_ranks, test_case.tokens, test_case.expert_rows[static_cast<std::size_t>(rank)]);
    views.push_back(schedules.back().view());
  }
  plan.build_layer_pass(test_case.shape, views, edit_emission);
}

TileCounts some_tiles() {
  TileCounts tiles;
  tiles.up = 2;
  tiles.down = 1;
  tiles.hidden = 2;
  tiles.input = 2;
  tiles.weight13 = 2;
  tiles.weight2 = 1;
  tiles.shared_up = 1;
  tiles.shared_hidden = 2;
  tiles.shared_weight13 = 1;
  tiles.shared_weight2 = 1;
  return tiles;
}

// ---------------------------------------------------------------------------------------------- Order of tasks

// Checks that one math agent and one copy agent, each walking its queue in order, never wait for what stands behind.
// For every task: whatever signals the counters and flags that it waits for stands before it; across the two queues,
// "before" means that it needs nothing from the other queue at or behind the waiting task.
class OrderChecker {
 public:
  explicit OrderChecker(const LaunchPlan& plan) : plan_(plan) {
    collect(plan_.queues().math_list.queue(), true);
    collect(plan_.queues().copy_list.queue(), false);
    find_reach_of_copies();
    check_math();
  }

  const std::vector<std::string>& complaints() const { return complaints_; }

 private:
  static constexpr std::int64_t kNone = -1;

  struct Signaller {
    bool is_math;
    std::int64_t ticket;
  };
  using Key = std::tuple<std::int32_t, bool, int, std::int64_t>;  // rank, is flag, kind, index

  struct SignalVisitor {
    std::map<Key, std::vector<Signaller>>& signallers;
    std::int32_t rank;
    Signaller self;
    void counter(CounterKind kind, std::int64_t index) {
      signallers[{rank, false, static_cast<int>(kind), index}].push_back(self);
    }
    void flags(FlagKind kind) { signallers[{rank, true, static_cast<int>(kind), 0}].push_back(self); }
  };

  void require(bool condition, const Task& task, const char* complaint) {
    if (condition) return;
    complaints_.push_back(std::string(to_string(task.kind())) + " of rank " + std::to_string(task.rank()) + ", block " +
                          std::to_string(task.block) + ": " + complaint);
  }

  void collect(const Queue& queue, bool is_math) {
    std::int64_t cursor = 0;
    for (std::int64_t ticket = 0; ticket < queue.num_tickets; ++ticket) {
      const Task task = find_task(queue, ticket, cursor);
      SignalVisitor visitor{signallers_, task.rank(), {is_math, ticket}};
      visit_signals(task, visitor);
    }
  }

  const std::vector<Wait>& waits_of(const Task& task) {
    list_waits(plan_.shape(), plan_.rank(task.rank()), task, Mutant{}, waits_);
    return waits_;
  }

  std::vector<Signaller> needed(const Task& task, const Wait& wait) {
    return wait.is_flag ? needed_for_flag(task, wait.flag) : needed_for_counter(task, wait);
  }

  std::vector<Signaller> needed_for_flag(const Task& task, FlagKind kind) {
    std::vector<Signaller> all;
    for (std::int32_t r = 0; r < static_cast<std::int32_t>(plan_.ranks().size()); ++r) {
      const std::vector<Signaller>& of_rank = signallers_[{r, true, static_cast<int>(kind), 0}];
      require(of_rank.size() == 1, task, "a rank must raise a flag once");
      all.insert(all.end(), of_rank.begin(), of_rank.end());
    }
    return all;
  }

  // The signallers that a wait needs, in the order of their queue. A counter is complete when a wait for it ends,
  // except for a carry, which several segments go through.
  std::vector<Signaller> needed_for_counter(const Task& task, const Wait& wait) {
    std::vector<Signaller> all = signallers_[{task.rank(), false, static_cast<int>(wait.counter), wait.index}];
    const auto count = static_cast<std::size_t>(wait.at_least);
    if (wait.counter == CounterKind::kCarry) {
      require(count < all.size(), task, "it goes through the carry after those that it waits for");
      all.resize(std::min(all.size(), count));
    } else {
      require(count == all.size(), task, "it waits for other than all tasks that count");
    }
    return all;
  }

  // reach_[c]: the last math ticket that copy tasks up to c need.
  void find_reach_of_copies() {
    const Queue queue = plan_.queues().copy_list.queue();
    std::int64_t cursor = 0;
    std::int64_t reach = kNone;
    for (std::int64_t ticket = 0; ticket < queue.num_tickets; ++ticket) {
      const Task task = find_task(queue, ticket, cursor);
      for (const Wait& wait : waits_of(task)) {
        for (const Signaller& signaller : needed(task, wait)) {
          if (signaller.is_math) {
            reach = std::max(reach, signaller.ticket);
          } else {
            require(signaller.ticket < ticket, task, "it waits for a copy behind it");
          }
        }
      }
      reach_.push_back(reach);
    }
  }

  void check_math() {
    const Queue queue = plan_.queues().math_list.queue();
    std::int64_t cursor = 0;
    for (std::int64_t ticket = 0; ticket < queue.num_tickets; ++ticket) {
      const Task task = find_task(queue, ticket, cursor);
      for (const Wait& wait : waits_of(task)) {
        for (const Signaller& signaller : needed(task, wait)) {
          const std::int64_t before =
              signaller.is_math ? signaller.ticket : reach_[static_cast<std::size_t>(signaller.ticket)];
          require(before < ticket, task, "it waits for math behind it");
        }
      }
    }
  }

  const LaunchPlan& plan_;
  std::map<Key, std::vector<Signaller>> signallers_;
  std::vector<Wait> waits_;
  std::vector<std::int64_t> reach_;
  std::vector<std::string> complaints_;
};

// The property in DESIGN's words, without the waits: the last task that uses row block b - ring stands before the
// first task that needs what block b's pull and its first tiles bring.
void check_rings(const LaunchPlan& plan) {
  const Queue queue = plan.queues().math_list.queue();
  for (std::size_t r = 0; r < plan.ranks().size(); ++r) {
    const auto blocks = static_cast<std::size_t>(plan.ranks()[r].blocks.num_blocks);
    std::vector<std::int64_t> first(blocks, queue.num_tickets);
    std::vector<std::int64_t> last(blocks, -1);
    std::int64_t cursor = 0;
    for (std::int64_t ticket = 0; ticket < queue.num_tickets; ++ticket) {
      const Task task = find_task(queue, ticket, cursor);
      const TaskKind kind = task.kind();
      const bool is_routed = kind == TaskKind::kUp || kind == TaskKind::kDown || kind == TaskKind::kRecompute ||
                             kind == TaskKind::kHidden || kind == TaskKind::kInput || kind == TaskKind::kWeight;
      if (!is_routed || task.rank() != static_cast<std::int32_t>(r)) continue;
      const std::int32_t end = task.block + (kind == TaskKind::kWeight ? task.segment->num_blocks : 1);
      for (std::int32_t b = task.block; b < end; ++b) {
        first[static_cast<std::size_t>(b)] = std::min(first[static_cast<std::size_t>(b)], ticket);
        last[static_cast<std::size_t>(b)] = std::max(last[static_cast<std::size_t>(b)], ticket);
      }
    }
    const auto ring = static_cast<std::size_t>(plan.shape().ring.ring_blocks);
    for (std::size_t b = ring; b < blocks; ++b) EXPECT_LT(last[b - ring], first[b]) << "block " << b;
  }
}

// ---------------------------------------------------------------------------------------------- Chunks and blocks

void check_blocks(const RankPass& rank, const Counts& expert_rows, std::int32_t block_rows) {
  const BlockTable& blocks = rank.blocks;
  std::int32_t block = 0;
  std::int32_t row = 0;
  for (std::size_t e = 0; e < expert_rows.size(); ++e) {
    EXPECT_EQ(blocks.expert_block_begin[e], block);
    for (std::int32_t left = expert_rows[e]; left > 0; left -= block_rows, ++block) {
      EXPECT_EQ(blocks.block_expert[block], static_cast<std::int32_t>(e));
      EXPECT_EQ(blocks.block_row_begin[block], row);
      EXPECT_EQ(blocks.block_row_count[block], std::min(left, block_rows));
      row += blocks.block_row_count[block];
    }
  }
  EXPECT_EQ(blocks.expert_block_begin[expert_rows.size()], block);
  EXPECT_EQ(blocks.num_blocks, block);
}

void check_saved_blocks(const PassShape& shape, const RankPass& rank) {
  bool is_prefix = true;
  for (std::int32_t b = 0; b < rank.blocks.num_blocks; ++b) {
    is_prefix = is_prefix && is_saved(shape, rank, b);
    EXPECT_EQ(is_saved(shape, rank, b), is_prefix) << "block " << b;
    EXPECT_EQ(is_saved(shape, rank, b), rank.blocks.block_row_end(b) <= shape.saved_rows);
  }
}

// The borders of chunks within an expert: none in an expert that fits into a chunk, near-equal pieces otherwise.
void check_split(const BlockTable& blocks, std::int32_t expert, std::int32_t chunk_blocks) {
  const std::int32_t begin = blocks.expert_block_begin[expert];
  const std::int32_t end = blocks.expert_block_begin[expert + 1];
  std::vector<std::int32_t> borders = {begin};
  for (std::int32_t q = 0; q < blocks.num_chunks; ++q) {
    if (blocks.chunk_begin[q] > begin && blocks.chunk_begin[q] < end) borders.push_back(blocks.chunk_begin[q]);
  }
  borders.push_back(end);
  EXPECT_EQ(static_cast<std::int32_t>(borders.size()) - 1, std::max(1, ceil_div(end - begin, chunk_blocks)));
  if (borders.size() == 2) return;
  EXPECT_TRUE(std::binary_search(blocks.chunk_begin, blocks.chunk_begin + blocks.num_chunks, begin));
  std::int32_t least = end - begin;
  std::int32_t most = 0;
  for (std::size_t i = 0; i + 1 < borders.size(); ++i) {
    least = std::min(least, borders[i + 1] - borders[i]);
    most = std::max(most, borders[i + 1] - borders[i]);
  }
  EXPECT_LE(most - least, 1);
}

void check_chunks(const RankPass& rank, const RingShape& ring) {
  const BlockTable& blocks = rank.blocks;
  EXPECT_EQ(blocks.chunk_begin[0], 0);
  EXPECT_EQ(blocks.chunk_begin[blocks.num_chunks], blocks.num_blocks);
  for (std::int32_t q = 0; q < blocks.num_chunks; ++q) {
    const std::int32_t size = blocks.chunk_begin[q + 1] - blocks.chunk_begin[q];
    EXPECT_GE(size, 1);
    EXPECT_LE(size, ring.chunk_blocks);
  }
  for (std::int32_t e = 0; e < blocks.num_experts; ++e) check_split(blocks, e, ring.chunk_blocks);
}

// ---------------------------------------------------------------------------------------------- Weight segments

// Segments of one rank follow each other block by block, so an expert is complete before the next one is opened.
void check_weight_segments(const LaunchPlan& plan, std::int32_t rank_index) {
  const RankPass& rank = plan.rank(rank_index);
  const BlockTable& blocks = rank.blocks;
  std::int32_t block = 0;
  std::int32_t expert = 0;
  std::int32_t segments = 0;
  std::int32_t carried = 0;
  for (const Segment& segment : plan.queues().math_list.segments) {
    if (segment.kind != TaskKind::kWeight || segment.rank != rank_index) continue;
    const std::int32_t end = segment.first_block + segment.num_blocks;
    ASSERT_EQ(segment.expert, expert);
    EXPECT_EQ(segment.first_block, block);
    EXPECT_EQ(segment.weight_segment, segments++);
    EXPECT_EQ(segment.num_tiles, plan.shape().weight_tiles());
    EXPECT_EQ(segment.first_part, block == blocks.expert_block_begin[expert]);
    EXPECT_EQ(segment.last_part, end == blocks.expert_block_begin[expert + 1]);
    EXPECT_EQ(segment.carry_index, segment.first_part && segment.last_part ? -1 : carried++);
    // Only an expert without blocks has an empty segment.
    EXPECT_EQ(segment.num_blocks == 0, blocks.expert_block_begin[expert] == blocks.expert_block_begin[expert + 1]);
    for (; block < end; ++block) EXPECT_EQ(rank.weight_segment_of_block[block], segment.weight_segment);
    if (segment.last_part) ++expert;
  }
  EXPECT_EQ(segments, rank.num_weight_segments);
  EXPECT_EQ(block, plan.shape().needs_routed_weights() ? blocks.num_blocks : 0);
  EXPECT_EQ(expert, plan.shape().needs_routed_weights() ? blocks.num_experts : 0);
}

// ---------------------------------------------------------------------------------------------- Task sets

using TaskKey = std::tuple<TaskKind, std::int32_t, std::int32_t, std::int32_t, std::int32_t>;

TaskKey key_of(const Task& task) {
  return {task.kind(), task.rank(), task.segment->weight_segment, task.block, task.tile};
}

// All tasks of a queue, written down segment by segment.
std::vector<TaskKey> naive_tasks(const SegmentList& list) {
  std::vector<TaskKey> tasks;
  for (const Segment& segment : list.segments) {
    EXPECT_EQ(segment.first_ticket, static_cast<std::int64_t>(tasks.size()));
    EXPECT_GT(segment.num_tasks(), 0);
    const bool walks_blocks = segment.kind == TaskKind::kWeight || segment.kind == TaskKind::kSharedWeight;
    for (std::int32_t tile = 0; tile < segment.num_tiles; ++tile) {
      for (std::int32_t b = 0; b < (walks_blocks ? 1 : segment.num_blocks); ++b) {
        tasks.emplace_back(segment.kind, segment.rank, segment.weight_segment, segment.first_block + b, tile);
      }
    }
  }
  return tasks;
}

// Several takers, each with a cursor of its own, take growing tickets.
void check_tickets(const SegmentList& list, Random& random) {
  const std::vector<TaskKey> expected = naive_tasks(list);
  ASSERT_EQ(list.num_tickets, static_cast<std::int64_t>(expected.size()));
  std::vector<std::int64_t> cursors(4, 0);
  for (std::int64_t ticket = 0; ticket < list.num_tickets; ++ticket) {
    const Task task = find_task(list.queue(), ticket, cursors[random.below(4)]);
    ASSERT_EQ(key_of(task), expected[static_cast<std::size_t>(ticket)]) << "ticket " << ticket;
  }
  std::vector<TaskKey> sorted = expected;
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(std::adjacent_find(sorted.begin(), sorted.end()), sorted.end()) << "a task stands in the queue twice";
}

std::int64_t count_tasks(const SegmentList& list, TaskKind kind, std::int32_t rank) {
  std::int64_t count = 0;
  for (const Segment& segment : list.segments) {
    if (segment.kind == kind && segment.rank == rank) count += segment.num_tasks();
  }
  return count;
}

// Together with "no task twice": every task that there has to be is there.
void check_task_counts(const LaunchPlan& plan, std::int32_t r) {
  const PassShape& shape = plan.shape();
  const RankPass& rank = plan.rank(r);
  const std::int64_t blocks = rank.blocks.num_blocks;
  const auto math = [&](TaskKind kind) { return count_tasks(plan.queues().math_list, kind, r); };
  const auto copies = [&](TaskKind kind) { return count_tasks(plan.queues().copy_list, kind, r); };
  const bool is_forward = shape.pass == Pass::kForward;
  EXPECT_EQ(copies(TaskKind::kStageInputs), 1);
  EXPECT_EQ(copies(TaskKind::kPull), is_forward || shape.needs_routed() ? blocks : 0);
  EXPECT_EQ(copies(TaskKind::kPublishDone), 1);
  EXPECT_EQ(copies(TaskKind::kFinish), 1);
  EXPECT_EQ(math(TaskKind::kUp), is_forward ? blocks * shape.tiles.up : 0);
  EXPECT_EQ(math(TaskKind::kDown), is_forward ? blocks * shape.tiles.down : 0);
  EXPECT_EQ(math(TaskKind::kOut), is_forward ? token_blocks(shape, rank) * shape.tiles.out : 0);
  EXPECT_EQ(math(TaskKind::kHidden), !is_forward && shape.needs_routed() ? blocks * shape.tiles.hidden : 0);
  EXPECT_EQ(math(TaskKind::kInput), is_forward ? 0 : blocks * shape.input_tiles());
  EXPECT_EQ(math(TaskKind::kInputSum), is_forward ? 0 : token_blocks(shape, rank) * shape.input_sum_tiles());
  std::int64_t recomputed = 0;
  for (std::int32_t b = 0; b < blocks; ++b) recomputed += is_saved(shape, rank, b) ? 0 : 1;
  EXPECT_EQ(math(TaskKind::kRecompute), !is_forward && shape.needs_routed() ? recomputed * shape.tiles.up : 0);
}

// ---------------------------------------------------------------------------------------------- All of it

void check_plan(const Case& test_case, Random& random) {
  SCOPED_TRACE(describe(test_case));
  static LaunchPlan plan;
  build(test_case, plan);
  for (std::size_t r = 0; r < plan.ranks().size(); ++r) {
    const auto rank = static_cast<std::int32_t>(r);
    check_blocks(plan.ranks()[r], test_case.expert_rows[r], test_case.shape.ring.block_rows);
    check_chunks(plan.ranks()[r], test_case.shape.ring);
    check_saved_blocks(test_case.shape, plan.ranks()[r]);
    if (test_case.shape.pass == Pass::kBackward) check_weight_segments(plan, rank);
    check_task_counts(plan, rank);
  }
  check_tickets(plan.queues().math_list, random);
  check_tickets(plan.queues().copy_list, random);
  check_rings(plan);
  EXPECT_EQ(OrderChecker(plan).complaints(), std::vector<std::string>{});
}

Needs only(bool x, bool topk_weights, bool w13, bool w2) { return {x, topk_weights, w13, w2, false, true}; }

const std::vector<Needs>& some_needs() {
  static const std::vector<Needs> needs = {Needs{},
                                           only(true, true, false, false),
                                           only(false, true, false, false),
                                           only(false, false, true, false),
                                           only(false, true, false, true),
                                           only(false, false, false, false)};
  return needs;
}

void check_both_directions(Case& test_case, const std::vector<Needs>& needs, Random& random) {
  test_case.shape.pass = Pass::kForward;
  check_plan(test_case, random);
  test_case.shape.pass = Pass::kBackward;
  for (const Needs& some : needs) {
    test_case.shape.needs = some;
    check_plan(test_case, random);
  }
}

// Every way to give `experts` experts up to `most` rows each.
template <class Visit>
void for_each_counts(std::size_t experts, std::int32_t most, Visit&& visit) {
  Counts counts(experts, 0);
  while (true) {
    visit(counts);
    std::size_t e = 0;
    while (e < experts && ++counts[e] > most) counts[e++] = 0;
    if (e == experts) return;
  }
}

// All rings and chunks of one rank whose experts have up to `most` blocks.
void check_one_rank(std::size_t experts, std::int32_t most) {
  Random random(experts);
  for_each_counts(experts, most, [&](const Counts& counts) {
    const std::int32_t blocks = std::accumulate(counts.begin(), counts.end(), 0);
    for (std::int32_t ring = kMinRingBlocks; ring <= std::max(kMinRingBlocks, blocks + 1); ++ring) {
      for (std::int32_t chunk = 1; chunk <= ring / kChunksPerRing && !::testing::Test::HasFailure(); ++chunk) {
        Case test_case;
        test_case.shape.ring = make_ring(1, ring, chunk);
        test_case.shape.tiles = some_tiles();
        test_case.shape.has_shared = blocks % 2 == 0;
        test_case.shape.saved_rows = random.between(0, blocks);
        test_case.expert_rows = {counts};
        check_both_directions(test_case, {some_needs()[0], some_needs()[random.below(5) + 1]}, random);
      }
    }
  });
}

TEST(PlanProperties, HoldForEverySmallExpert) { check_one_rank(1, scaled(24, 10)); }
TEST(PlanProperties, HoldForEveryPairOfExperts) { check_one_rank(2, scaled(8, 4)); }
TEST(PlanProperties, HoldForEveryThreeExperts) { check_one_rank(3, scaled(5, 2)); }

TEST(PlanProperties, HoldForEveryPairOfRanks) {
  Random random(5);
  for_each_counts(4, scaled(4, 2), [&](const Counts& counts) {
    for (std::int32_t ring = kMinRingBlocks; ring <= 7 && !::testing::Test::HasFailure(); ring += 2) {
      Case test_case;
      test_case.shape.ring = make_ring(1, ring, random.between(1, ring));
      test_case.shape.tiles = some_tiles();
      test_case.shape.saved_rows = random.between(0, 8);
      test_case.expert_rows = {{counts[0], counts[1]}, {counts[2], counts[3]}};
      check_both_directions(test_case, {some_needs()[random.below(6)]}, random);
    }
  });
}

TileCounts random_tiles(Random& random) {
  TileCounts tiles = some_tiles();
  for (std::int32_t* count : {&tiles.up, &tiles.down, &tiles.hidden, &tiles.input, &tiles.weight13, &tiles.weight2}) {
    *count = random.between(1, 3);
  }
  return tiles;
}

Case random_large_case(Random& random) {
  Case test_case;
  const std::int32_t num_ranks = random.between(1, 6);
  const std::int32_t experts = random.between(1, 6);
  const std::int32_t block_rows = random.between(1, 8);
  const std::int32_t most_rows = random.pick({4, 40, 200});
  std::int32_t blocks = 0;
  for (std::int32_t rank = 0; rank < num_ranks; ++rank) {
    Counts& counts = test_case.expert_rows.emplace_back();
    for (std::int32_t e = 0; e < experts; ++e) {
      counts.push_back(random.chance(0.2) ? 0 : random.between(0, most_rows));
      blocks += ceil_div(counts.back(), block_rows);
    }
  }
  const std::int32_t ring = random.between(kMinRingBlocks, random.chance(0.5) ? 12 : std::max(12, blocks));
  test_case.shape.ring = make_ring(block_rows, std::int64_t{ring} * block_rows + random.between(0, block_rows - 1),
                                   random.between(0, ring * block_rows));
  test_case.shape.tiles = random_tiles(random);
  test_case.shape.has_shared = random.chance(0.5);
  test_case.shape.saved_rows = random.between(0, most_rows * experts);
  test_case.tokens = random.between(0, 40);
  return test_case;
}

TEST(PlanProperties, HoldForRandomLargeSizes) {
  Random random(3);
  const int cases = scaled(400, 40);
  for (int i = 0; i < cases && !HasFailure(); ++i) {
    Case test_case = random_large_case(random);
    check_both_directions(test_case, {some_needs()[0], some_needs()[random.below(6)]}, random);
  }
}

// The checker itself: it finds partial weight gradients that come too late.
TEST(OrderChecker, FindsBrokenPlans) {
  for (const char* name : {"no_partial_weights", "partial_weights_one_block_late"}) {
    Case test_case;
    test_case.shape.pass = Pass::kBackward;
    test_case.shape.ring = make_ring(1, 3, 1);
    test_case.shape.tiles = some_tiles();
    test_case.expert_rows = {{6}};
    LaunchPlan plan;
    build(test_case, plan);
    EXPECT_TRUE(OrderChecker(plan).complaints().empty());
    build(test_case, plan, find_mutant(name)->edit_emission);
    EXPECT_FALSE(OrderChecker(plan).complaints().empty()) << name;
  }
}

TEST(MakeRing, HoldsThreeChunksAndNoMoreRowsThanGiven) {
  for (std::int32_t block_rows = 1; block_rows <= 5; ++block_rows) {
    for (std::int64_t rows = min_ring_rows(block_rows); rows < 60; ++rows) {
      for (std::int64_t chunk_rows = 0; chunk_rows < 60; ++chunk_rows) {
        const RingShape ring = make_ring(block_rows, rows, chunk_rows);
        EXPECT_GE(ring.ring_blocks, kMinRingBlocks);
        EXPECT_LE(ring.ring_blocks * block_rows, rows);
        EXPECT_GT((ring.ring_blocks + 1) * block_rows, rows);
        EXPECT_GE(ring.chunk_blocks, 1);
        EXPECT_LE(kChunksPerRing * ring.chunk_blocks, ring.ring_blocks);
      }
    }
  }
}

}  // namespace
}  // namespace clowder::plan::explore

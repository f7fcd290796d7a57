#include "random_plan.h"

#include <algorithm>
#include <sstream>

#include "random.h"

namespace clowder::plan::explore {
namespace {

std::int32_t random_ranks(Random& random) {
  if (random.chance(0.02)) return random.pick({36, 64, 72});
  return random.chance(0.6) ? random.between(1, 4) : random.between(1, 8);
}

std::int32_t random_topk(Random& random) { return random.chance(0.04) ? random.between(5, 16) : random.between(1, 4); }

ScheduleShape random_shape(Random& random) {
  ScheduleShape shape;
  shape.num_ranks = random_ranks(random);
  shape.num_experts = shape.num_ranks * random.between(1, shape.num_ranks > 8 ? 2 : 5);
  shape.topk = shape.num_ranks > 8 ? random.between(1, 2) : random_topk(random);
  // Few rows, so that many plans can be run.
  const std::int32_t rows = random.between(1, random.chance(0.7) ? 64 : 160);
  shape.max_tokens = std::clamp(rows / (shape.num_ranks * shape.topk), 1, 24);
  return shape;
}

std::vector<std::int32_t> random_tokens(Random& random, const ScheduleShape& shape) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(shape.num_ranks), shape.max_tokens);
  if (random.chance(0.03)) std::fill(tokens.begin(), tokens.end(), 0);
  if (random.chance(0.5)) return tokens;
  const double empty = random.pick({0.0, 0.2, 0.8});
  for (std::int32_t& count : tokens) {
    count = random.chance(empty) ? 0 : std::min(count, random.between(0, shape.max_tokens));
  }
  return tokens;
}

// Chooses expert ids with one kind of skew for the whole batch.
class ExpertChooser {
 public:
  ExpertChooser(Random& random, const ScheduleShape& shape)
      : random_(random),
        experts_(shape.num_experts),
        hot_begin_(random.between(0, experts_ - 1)),
        hot_(random.pick({0.0, 0.0, 0.5, 0.9, 1.0})),
        no_route_(random.pick({0.0, 0.0, 0.1, 0.5})),
        bad_(random.pick({0.0, 0.0, 0.0, 0.1})) {
    hot_end_ = std::min(experts_, hot_begin_ + random.between(1, shape.experts_per_rank()));
  }

  std::int32_t choose() {
    if (random_.chance(bad_)) return random_.pick({-2, experts_, experts_ + 7, INT32_MIN, INT32_MAX});
    if (random_.chance(no_route_)) return -1;
    if (random_.chance(hot_)) return random_.between(hot_begin_, hot_end_ - 1);
    return random_.between(0, experts_ - 1);
  }

 private:
  Random& random_;
  std::int32_t experts_;
  std::int32_t hot_begin_;
  std::int32_t hot_end_ = 0;
  double hot_;
  double no_route_;
  double bad_;
};

Routing random_routing(Random& random, const ScheduleShape& shape) {
  Routing routing;
  routing.tokens = random_tokens(random, shape);
  ExpertChooser chooser(random, shape);
  for (const std::int32_t tokens : routing.tokens) {
    std::vector<std::int32_t>& ids = routing.topk_idx.emplace_back(static_cast<std::size_t>(tokens * shape.topk));
    for (std::int32_t& id : ids) id = chooser.choose();
  }
  return routing;
}

Needs random_needs(Random& random) {
  Needs needs;
  if (random.chance(0.4)) return needs;
  for (bool* need : {&needs.x, &needs.topk_weights, &needs.w13, &needs.w2, &needs.shared_w13, &needs.shared_w2}) {
    *need = random.chance(0.5);
  }
  return needs;
}

// Builds programs: schedules, forwards and backwards of layers that share one workspace.
class ProgramWriter {
 public:
  ProgramWriter(Random& random, PlanSpec& spec) : random_(random), spec_(spec) { spec_.num_layers = 0; }

  void schedule() {
    spec_.steps.push_back(random_routing(random_, spec_.schedule));
    Operation& operation = spec_.program.emplace_back();
    operation.step = step();
  }
  std::int32_t forward() {
    Operation& operation = spec_.program.emplace_back();
    operation.pass = Pass::kForward;
    operation.step = step();
    operation.layer = spec_.num_layers++;
    step_of_layer_.push_back(operation.step);
    return operation.layer;
  }
  void backward(std::int32_t layer) {
    Operation& operation = spec_.program.emplace_back();
    operation.pass = Pass::kBackward;
    operation.step = step_of_layer_[static_cast<std::size_t>(layer)];
    operation.layer = layer;
    operation.needs = random_needs(random_);
  }

 private:
  std::int32_t step() const { return static_cast<std::int32_t>(spec_.steps.size()) - 1; }

  Random& random_;
  PlanSpec& spec_;
  std::vector<std::int32_t> step_of_layer_;
};

void write_random_program(Random& random, PlanSpec& spec) {
  ProgramWriter writer(random, spec);
  const std::int32_t turns = random.between(3, spec.schedule.num_ranks > 8 ? 5 : 8);
  std::vector<std::int32_t> open;
  writer.schedule();
  for (std::int32_t turn = 1; turn < turns; ++turn) {
    if (random.chance(0.2)) {
      writer.schedule();
    } else if (open.empty() || random.chance(0.4)) {
      open.push_back(writer.forward());
    } else {
      // First or last: both orders of backwards.
      const auto which = random.chance(0.5) ? open.begin() : open.end() - 1;
      writer.backward(*which);
      open.erase(which);
    }
  }
}

// Random, and short of the worst case only by what one expert's rows can fill.
RingShape random_ring(Random& random, const ScheduleShape& shape, std::int32_t block_rows) {
  const std::int32_t most = std::max(kMinRingBlocks, max_blocks(shape, block_rows));
  const std::int32_t limit = random.pick({kMinRingBlocks, 4, 6, 9, 12, most});
  const std::int32_t blocks = random.between(kMinRingBlocks, std::min(limit, most));
  const std::int32_t rest = random.between(0, block_rows - 1);
  return make_ring(block_rows, std::int64_t{blocks} * block_rows + rest, random.between(0, blocks * block_rows));
}

TileCounts random_tiles(Random& random, bool has_shared) {
  TileCounts tiles;
  const auto count = [&] { return random.between(1, random.chance(0.5) ? 2 : 3); };
  tiles.up = count();
  tiles.down = count();
  tiles.hidden = count();
  tiles.input = count();
  tiles.weight13 = count();
  tiles.weight2 = count();
  tiles.input_sum = count();
  if (!has_shared) return tiles;
  tiles.shared_up = count();
  tiles.out = count();
  tiles.shared_hidden = count();
  tiles.shared_weight13 = count();
  tiles.shared_weight2 = count();
  return tiles;
}

std::vector<std::int32_t> random_groups(Random& random, std::int32_t num_ranks) {
  std::vector<std::int32_t> begin = {0};
  const double split = random.pick({0.0, 0.3, 1.0, 1.0});  // virtual ranks, some of both, processes
  for (std::int32_t rank = 1; rank < num_ranks; ++rank) {
    if (random.chance(split)) begin.push_back(rank);
  }
  begin.push_back(num_ranks);
  return begin;
}

Interleaving random_interleaving(Random& random, std::int32_t num_groups) {
  Interleaving interleaving;
  interleaving.seed = random.next();
  interleaving.priorities = static_cast<Priorities>(random.between(0, kNumPriorities - 1));
  interleaving.random = random.pick({0.0, 0.02, 0.2, 1.0});
  interleaving.change = random.pick({0.0, 0.01, 0.1});
  interleaving.slow_tasks = random.pick({0.0, 0.05, 0.3});
  const double slow = random.pick({0.0, 0.1, 0.2});
  for (int kind = 0; kind < kNumTaskKinds; ++kind) {
    if (random.chance(slow)) interleaving.slow_kinds |= 1u << kind;
  }
  interleaving.slow_from_ticket = random.chance(0.3);
  interleaving.flags_at_once = random.chance(0.3);
  interleaving.flag_pace = random.pick({0.0, 0.02, 0.3});
  interleaving.stalled_group = random.between(0, num_groups - 1);
  return interleaving;
}

std::vector<std::int64_t> count_rows(const ScheduleShape& shape, const Routing& routing) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(shape.num_ranks), 0);
  for (const std::vector<std::int32_t>& ids : routing.topk_idx) {
    for (const std::int32_t id : ids) {
      if (is_expert(id, shape.num_experts)) ++rows[static_cast<std::size_t>(id / shape.experts_per_rank())];
    }
  }
  return rows;
}

}  // namespace

PassShape PlanSpec::pass_shape(const Operation& operation) const {
  PassShape shape;
  shape.pass = operation.pass;
  shape.ring = operation.pass == Pass::kBackward ? backward_ring : forward_ring;
  shape.saved_rows = saved_rows;
  shape.has_shared = has_shared;
  shape.keep_x = keep_x;
  shape.tiles = tiles;
  shape.needs = operation.needs;
  return shape;
}

bool PlanSpec::is_x_free_after_forward(std::int32_t layer) const {
  for (const Operation& operation : program) {
    if (operation.pass != Pass::kBackward || operation.layer != layer) continue;
    if (!keep_x || (has_shared && operation.needs.shared_w13)) return false;
    const std::vector<std::int64_t> rows = count_rows(schedule, steps[static_cast<std::size_t>(operation.step)]);
    return *std::max_element(rows.begin(), rows.end()) <= saved_rows;
  }
  return true;
}

PlanSpec random_plan(std::uint64_t seed) {
  Random random(seed * 0x2545f4914f6cdd1du + 1);
  PlanSpec spec;
  spec.seed = seed;
  spec.schedule = random_shape(random);
  write_random_program(random, spec);
  const std::int32_t block_rows = random.pick({1, 1, 1, 2, 2, 4});
  spec.forward_ring = random_ring(random, spec.schedule, block_rows);
  spec.backward_ring = random_ring(random, spec.schedule, block_rows);
  const auto most_rows = static_cast<std::int32_t>(spec.schedule.max_rows());
  spec.saved_rows = random.pick({0, most_rows, random.between(0, most_rows), random.between(0, 8)});
  spec.has_shared = random.chance(0.5);
  spec.keep_x = random.chance(0.3);
  spec.staged_inputs = spec.schedule.num_ranks > 1 && random.chance(0.8);
  spec.tiles = random_tiles(random, spec.has_shared);
  spec.group_begin = random_groups(random, spec.schedule.num_ranks);
  spec.blocks = random.pick({1, 1, 2, 3, 4, 8});
  if (spec.num_groups() > 8) spec.blocks = std::min(spec.blocks, 2);
  spec.interleaving = random_interleaving(random, spec.num_groups());
  return spec;
}

std::string describe(const PlanSpec& spec) {
  std::ostringstream text;
  text << "plan " << spec.seed << ": R " << spec.schedule.num_ranks << " in " << spec.num_groups() << " launches of "
       << spec.blocks << " blocks, E " << spec.schedule.num_experts << ", K " << spec.schedule.topk << ", max_tokens "
       << spec.schedule.max_tokens << ", block_rows " << spec.forward_ring.block_rows << ", ring "
       << spec.forward_ring.ring_blocks << "/" << spec.backward_ring.ring_blocks << ", chunk "
       << spec.forward_ring.chunk_blocks << "/" << spec.backward_ring.chunk_blocks << ", saved_rows " << spec.saved_rows
       << (spec.has_shared ? ", shared" : "") << (spec.keep_x ? ", keep_x" : "")
       << (spec.staged_inputs ? ", staged" : "") << ", passes";
  for (const Operation& operation : spec.program) {
    text << ' ' << "SFB"[static_cast<int>(operation.pass)]
         << (operation.pass == Pass::kSchedule ? operation.step : operation.layer);
  }
  text << ", priorities " << static_cast<int>(spec.interleaving.priorities);
  return text.str();
}

}  // namespace clowder::plan::explore

#include "memory_model.h"

#include <algorithm>

namespace clowder::plan::explore {
namespace {

const char* name_of(Value value) {
  switch (value) {
    case Value::kNothing:
      return "nothing";
    case Value::kBlank:
      return "a blank output";
    case Value::kIds:
      return "expert ids";
    case Value::kX:
      return "x";
    case Value::kDy:
      return "dy";
    case Value::kWeights:
      return "topk_weights";
    case Value::kPulledX:
      return "pulled x";
    case Value::kPulledDy:
      return "pulled dy";
    case Value::kPulledWeights:
      return "pulled topk_weights";
    case Value::kKeptX:
      return "kept x";
    case Value::kHidden:
      return "h";
    case Value::kGateUp:
      return "g, u";
    case Value::kGradient:
      return "dg, du";
    case Value::kWeightedHidden:
      return "wh";
    case Value::kDwPartial:
      return "partial dw";
    case Value::kSlot:
      return "slot";
    case Value::kDwSlot:
      return "dw slot";
    case Value::kCarry:
      return "carry";
    case Value::kSharedHidden:
      return "shared h";
    case Value::kSharedGateUp:
      return "shared g, u";
    case Value::kSharedGradient:
      return "shared dg, du";
    case Value::kSharedWeightedHidden:
      return "shared wh";
    case Value::kOut:
      return "out";
    case Value::kDx:
      return "dx";
    case Value::kDw:
      return "dtopk_weights";
    case Value::kWeightGradient:
      return "weight gradient";
    case Value::kSharedWeightGradient:
      return "shared weight gradient";
  }
  return "unknown";
}

constexpr std::size_t kSlabCells = 1u << 14;

}  // namespace

std::string to_string(Tag tag) {
  std::string text = name_of(static_cast<Value>(tag >> 58));
  text += " (instance " + std::to_string(tag >> 50 & 0xff) + ", rank " + std::to_string(tag >> 42 & 0xff) + ", " +
          std::to_string(tag >> 16 & 0x3ffffff) + ", " + std::to_string(tag & 0xffff) + ")";
  return text;
}

void Cell::begin_read(Tag expected) {
  if (is_written) throw Violation("reads " + to_string(expected) + " while it is being written");
  if (tag != expected) throw Violation("reads " + to_string(expected) + " but finds " + to_string(tag));
  ++readers;
  ++reads;
}

void Cell::begin_write(Tag written) {
  if (is_written) throw Violation("writes " + to_string(written) + " where another writes");
  if (readers != 0)
    throw Violation("writes " + to_string(written) + " over " + to_string(tag) + ", which is being read");
  is_written = true;
}

void Cell::end_write(Tag written) {
  is_written = false;
  tag = written;
  reads = 0;
}

void Grid::report_outside(std::int64_t row, std::int64_t column) const {
  throw Violation("touches [" + std::to_string(row) + ", " + std::to_string(column) + "] of a buffer of [" +
                  std::to_string(rows_) + ", " + std::to_string(columns_) + "]");
}

Grid Arena::grid(std::int64_t rows, std::int64_t columns) {
  const auto cells = static_cast<std::size_t>(rows * columns);
  while (slab_ < slabs_.size() && used_ + cells > slabs_[slab_].size) {
    ++slab_;
    used_ = 0;
  }
  if (slab_ == slabs_.size()) {
    const std::size_t size = std::max(cells, kSlabCells);
    slabs_.push_back({std::make_unique<Cell[]>(size), size});
  }
  Cell* begin = slabs_[slab_].cells.get() + used_;
  used_ += cells;
  std::fill(begin, begin + cells, Cell{});
  return Grid(begin, static_cast<std::int32_t>(rows), static_cast<std::int32_t>(columns));
}

void Arena::reset() {
  slab_ = 0;
  used_ = 0;
}

namespace {

Workspace allocate_workspace(const PlanSpec& spec, Arena& arena) {
  const TileCounts& tiles = spec.tiles;
  const std::int64_t tokens = spec.schedule.max_tokens;
  const std::int64_t slots = spec.schedule.slots_per_rank();
  const std::int64_t token_blocks = spec.max_token_blocks();
  const std::int64_t ring = std::max(spec.forward_ring.ring_blocks, spec.backward_ring.ring_blocks);
  Workspace memory;
  memory.ids = arena.grid(2);
  memory.staged_x = arena.grid(tokens);
  memory.staged_dy = arena.grid(tokens);
  memory.staged_weights = arena.grid(tokens);
  memory.x_ring = arena.grid(ring);
  memory.dy_ring = arena.grid(ring);
  memory.weights_ring = arena.grid(ring);
  memory.hidden_ring = arena.grid(ring, tiles.up);
  memory.gate_up_ring = arena.grid(ring, tiles.up);
  memory.gradient_ring = arena.grid(ring, tiles.hidden);
  memory.weighted_ring = arena.grid(ring, tiles.hidden);
  memory.dw_ring = arena.grid(ring, tiles.hidden);
  memory.slots = arena.grid(slots, std::max(tiles.down, tiles.input));
  memory.dw_slots = arena.grid(slots);
  memory.carry = arena.grid(tiles.weight13 + tiles.weight2);
  memory.shared_hidden = arena.grid(token_blocks, tiles.shared_up);
  memory.shared_gradient = arena.grid(token_blocks, tiles.shared_hidden);
  memory.shared_weighted = arena.grid(token_blocks, tiles.shared_hidden);
  return memory;
}

// What forward saves is allocated when its blocks are known.
LayerMemory allocate_layer(const PlanSpec& spec, Arena& arena) {
  const TileCounts& tiles = spec.tiles;
  const std::int64_t tokens = spec.schedule.max_tokens;
  const std::int64_t token_blocks = spec.max_token_blocks();
  LayerMemory memory;
  memory.x = arena.grid(tokens);
  memory.dy = arena.grid(tokens);
  memory.weights = arena.grid(tokens);
  memory.out = arena.grid(token_blocks, tiles.out);
  memory.dx = arena.grid(token_blocks, tiles.input_sum);
  memory.dw = arena.grid(token_blocks);
  memory.weight_gradient = arena.grid(spec.schedule.experts_per_rank(), tiles.weight13 + tiles.weight2);
  memory.shared_weight_gradient = arena.grid(tiles.shared_weight13 + tiles.shared_weight2);
  memory.shared_gate_up = arena.grid(token_blocks, tiles.shared_up);
  return memory;
}

}  // namespace

void Memory::allocate(const PlanSpec& spec) {
  arena.reset();
  ranks.clear();
  layers.clear();
  for (std::int32_t r = 0; r < spec.schedule.num_ranks; ++r) ranks.push_back(allocate_workspace(spec, arena));
  const std::int32_t all = spec.num_layers * spec.schedule.num_ranks;
  for (std::int32_t i = 0; i < all; ++i) layers.push_back(allocate_layer(spec, arena));
}

}  // namespace clowder::plan::explore

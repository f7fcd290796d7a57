// Shadow memory. A cell stands for a piece of memory that tasks read and write as a whole; it holds a tag that says
// which value of which pass stands there, and who is using it at the moment.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "random_plan.h"

namespace clowder::plan::explore {

// A broken promise of the plan.
class Violation : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Value : std::int32_t {
  kNothing,  // never written, or overwritten by its owner
  kBlank,    // an output that waits for its one writer
  kIds,
  kX,
  kDy,
  kWeights,
  kPulledX,
  kPulledDy,
  kPulledWeights,
  kKeptX,
  kHidden,          // h
  kGateUp,          // g and u
  kGradient,        // dg and du
  kWeightedHidden,  // wh
  kDwPartial,
  kSlot,
  kDwSlot,
  kCarry,
  kSharedHidden,
  kSharedGateUp,
  kSharedGradient,
  kSharedWeightedHidden,
  kOut,
  kDx,
  kDw,
  kWeightGradient,
  kSharedWeightGradient,
};

// A value's identity: what, of which pass (or layer), of which rank, and two indices within it.
using Tag = std::uint64_t;

constexpr Tag make_tag(Value value, std::int64_t instance, std::int64_t rank = 0, std::int64_t a = 0,
                       std::int64_t b = 0) {
  return static_cast<Tag>(value) << 58 | static_cast<Tag>(instance & 0xff) << 50 | static_cast<Tag>(rank & 0xff) << 42 |
         static_cast<Tag>(a & 0x3ffffff) << 16 | static_cast<Tag>(b & 0xffff);
}
std::string to_string(Tag tag);

struct Cell {
  Tag tag = 0;
  std::uint16_t readers = 0;  // in progress
  std::uint16_t reads = 0;    // since it was written
  bool is_written = false;    // in progress

  void begin_read(Tag expected);
  void end_read() { --readers; }
  void begin_write(Tag tag);
  void end_write(Tag written);
};

// Rows of cells.
class Grid {
 public:
  Grid() = default;
  Grid(Cell* cells, std::int32_t rows, std::int32_t columns) : cells_(cells), rows_(rows), columns_(columns) {}

  Cell& at(std::int64_t row, std::int64_t column = 0) const {
    if (row < 0 || row >= rows_ || column < 0 || column >= columns_) report_outside(row, column);
    return cells_[row * columns_ + column];
  }
  std::int32_t rows() const { return rows_; }
  std::int32_t columns() const { return columns_; }

 private:
  [[noreturn]] void report_outside(std::int64_t row, std::int64_t column) const;

  Cell* cells_ = nullptr;
  std::int32_t rows_ = 0;
  std::int32_t columns_ = 0;
};

// Gives out grids and takes all of them back at once, so that many small explorations share their memory.
class Arena {
 public:
  Grid grid(std::int64_t rows, std::int64_t columns = 1);
  void reset();

 private:
  struct Slab {
    std::unique_ptr<Cell[]> cells;
    std::size_t size = 0;
  };
  std::vector<Slab> slabs_;
  std::size_t slab_ = 0;
  std::size_t used_ = 0;
};

// One rank's workspace: all passes and layers share it.
struct Workspace {
  Grid ids;       // [2], by the epoch's parity
  Grid staged_x;  // [max_tokens]; peers read these three
  Grid staged_dy;
  Grid staged_weights;
  Grid x_ring;  // [ring]
  Grid dy_ring;
  Grid weights_ring;
  Grid hidden_ring;      // [ring, up tiles]
  Grid gate_up_ring;     // [ring, up tiles]
  Grid gradient_ring;    // [ring, hidden tiles]
  Grid weighted_ring;    // [ring, hidden tiles]
  Grid dw_ring;          // [ring, hidden tiles]
  Grid slots;            // [max_tokens * K, column tiles]; peers write these two
  Grid dw_slots;         // [max_tokens * K]
  Grid carry;            // [weight tiles]
  Grid shared_hidden;    // [token blocks, shared up tiles]
  Grid shared_gradient;  // [token blocks, shared hidden tiles]
  Grid shared_weighted;  // [token blocks, shared hidden tiles]
};

// What belongs to one layer on one rank: the caller's tensors and what forward saves.
struct LayerMemory {
  Grid x;  // [max_tokens]; peers read these three where inputs are not staged
  Grid dy;
  Grid weights;
  Grid out;                     // [token blocks, out tiles]
  Grid dx;                      // [token blocks, input sum tiles]
  Grid dw;                      // [token blocks]
  Grid weight_gradient;         // [E_l, weight tiles]
  Grid shared_weight_gradient;  // [shared weight tiles]
  Grid saved_gate_up;           // [row blocks, up tiles]
  Grid kept_x;                  // [row blocks]
  Grid shared_gate_up;          // [token blocks, shared up tiles]
};

struct Memory {
  Arena arena;
  std::vector<Workspace> ranks;
  std::vector<LayerMemory> layers;  // [layers * R]

  void allocate(const PlanSpec& spec);
  LayerMemory& layer(std::int32_t layer_index, std::int32_t rank) {
    return layers[static_cast<std::size_t>(layer_index) * ranks.size() + static_cast<std::size_t>(rank)];
  }
  Workspace& rank(std::int32_t index) { return ranks[static_cast<std::size_t>(index)]; }
};

}  // namespace clowder::plan::explore

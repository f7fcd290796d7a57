// What every task reads and writes: the protocol's other half. The plan says what a task waits for; this says why.
//
// Where engines may differ, the table takes the wider choice: a task reads all column tiles of what it consumes, and
// holds everything that it touches from its begin to its end.
#pragma once

#include <cstdint>
#include <vector>

#include "memory_model.h"
#include "plan/task.h"

namespace clowder::plan::explore {

enum class AccessMode : std::int32_t {
  kRead,
  kWrite,
  kWriteOnce,  // an output: blank before
  kUpdate,     // read, then written by the same task
  kCopy,       // writes what it reads, whatever that is
};

struct Access {
  AccessMode mode = AccessMode::kRead;
  Cell* cell = nullptr;
  Tag expected = 0;        // of kRead, kUpdate
  Tag written = 0;         // of the others
  Cell* source = nullptr;  // of kCopy
};

// All accesses of one task.
class AccessList {
 public:
  void clear() { accesses_.clear(); }
  void read(Cell& cell, Tag expected) { accesses_.push_back({AccessMode::kRead, &cell, expected, 0, nullptr}); }
  void write(Cell& cell, Tag written) { accesses_.push_back({AccessMode::kWrite, &cell, 0, written, nullptr}); }
  void write_once(Cell& cell, Tag written) {
    accesses_.push_back({AccessMode::kWriteOnce, &cell, 0, written, nullptr});
  }
  void update(Cell& cell, Tag expected, Tag written) {
    accesses_.push_back({AccessMode::kUpdate, &cell, expected, written, nullptr});
  }
  void copy(Cell& from, Cell& to) { accesses_.push_back({AccessMode::kCopy, &to, 0, 0, &from}); }

  // A task's two moments: between them its reads and writes are in progress.
  void begin();
  void end();

  const std::vector<Access>& accesses() const { return accesses_; }

 private:
  std::vector<Access> accesses_;
};

// One rank's view of the pass that it runs.
struct PassContext {
  const PlanSpec* spec = nullptr;
  Memory* memory = nullptr;
  const PassShape* shape = nullptr;
  const RankPass* rank = nullptr;
  ConstSchedule schedule;
  std::int32_t instance = 0;  // number of the pass in the program
  std::int32_t layer = 0;
  std::int32_t ids_parity = 0;  // of the schedule epoch
};

// Appends the task's accesses. kBuildSchedule's and kStageIds's are here too; the schedule itself is the caller's.
void list_accesses(const PassContext& context, const Task& task, AccessList& list);

// The caller's tensors of a layer as a pass expects them.
Tag x_tag(std::int32_t layer, std::int32_t rank, std::int64_t token);
Tag dy_tag(std::int32_t layer, std::int32_t rank, std::int64_t token);
Tag weights_tag(std::int32_t layer, std::int32_t rank, std::int64_t token);

// Memory for what the layer saves in this pass.
void allocate_saved(const PassContext& context);

// What the rank's caller does around a pass of a layer. Before: it writes the inputs, and the outputs become blank.
// After: it overwrites whatever the contract lets it overwrite.
void list_preparation(const PassContext& context, AccessList& list);
void list_return(const PassContext& context, AccessList& list);

// When a pass has ended, all its outputs have been written, and every slot with a route has been read once.
void check_outputs(const PassContext& context);

}  // namespace clowder::plan::explore

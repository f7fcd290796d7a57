// The expert-parallel MoE layer for C++ users: a Workspace, and the three passes that run on it.
//
//   Workspace workspace(shape, group);
//   workspace.build_schedule(ids);          // once a step
//   workspace.forward(inputs);              // reads the schedule
//   workspace.backward(inputs);             // reads the schedule and what forward saved
//
// All matrices are row-major and contiguous. A vector of per-rank arguments has one entry for each of
// group.local_ranks(), in that order. A schedule call or a pass is collective: every rank of the group makes it, and
// all ranks make their calls in one order.
//
// **Memory.** Tensors, schedules and saved tensors are the caller's, a workspace keeps no pointer to them. They must
// stay valid, and outputs untouched, until the pass has ended: on the CPU engine until the call returns, on a GPU
// engine until `stream` has passed the call. Vectors of arguments are read during the call alone. A workspace owns its
// rings and scratch, and shares the group and its symmetric memory; its destructor waits for passes that still run.
//
// **Threads.** Calls may come from any thread. Those on one workspace run one after the other, in the order in which
// they get hold of it; those on different workspaces run side by side. is_dead, check, wait_reports and the readings of
// sizes may be called at any time, also while a pass runs. A group's allocate, hence the constructor of a workspace, is
// called by one thread at a time for each Group object.
//
// **Errors.** A call that throws Error(kArgument) has done nothing, and the workspace is as it was. On a GPU engine,
// what goes wrong on the device is thrown by the next call, or by check().
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "clowder/export.h"
#include "clowder/group.h"
#include "clowder/status.h"
#include "clowder/types.h"

namespace clowder {

// The cudaStream_t that a GPU engine orders a call on; null is the default stream. The CPU engine ignores it: its calls
// return when the pass has ended.
using Stream = void*;

// What an engine records of its workers; src/observe/timeline.h has it, for Clowder's own tools.
class Timeline;

// The engine, tuning and limits. On one engine, none of them changes a bit of any result.
struct WorkspaceOptions {
  static constexpr std::int64_t kDefault = -1;

  std::int64_t ring_rows = kDefault;   // rows that a pass holds at once; default: the larger of three chunks and a
                                       // quarter of ceil(1.25 * max_tokens * K), in whole row blocks
  std::int64_t saved_rows = kDefault;  // rows whose g and u are saved; the rest is recomputed in backward; default:
                                       // ceil(1.25 * max_tokens * K). All three are cut to what the worst routing fills
  std::int64_t chunk_rows = kDefault;  // grain of overlap
  std::int32_t blocks = kDefault;      // pairs of a math worker and a copy agent; default: the machine's cores
  bool keep_x = false;                 // keep pulled rows of x for backward instead of pulling them again
  double timeout_s = 60.0;             // a launch in which nothing has happened for so long is given up
  bool poison = false;                 // fill every buffer with NaN before each pass (tests)
  std::uint64_t jitter_seed = 0;       // random delays in copies and tasks (tests); 0 = none
  Timeline* timeline = nullptr;        // the caller's, records every pass; null: nothing is recorded
  EngineKind engine = EngineKind::kCpu;
};

// One rank's choices. `topk_idx` [tokens, K] holds int32 or int64; -1 is no route, other ids outside [0, E) are counted
// and skipped.
struct ExpertIds {
  const void* topk_idx = nullptr;
  bool is_int64 = false;
  std::int64_t tokens = 0;
};

// One expert: w1 (gate) and w3 (up) [I, H], w2 (down) [H, I], bf16.
struct ExpertWeights {
  const bf16* w1 = nullptr;
  const bf16* w3 = nullptr;
  const bf16* w2 = nullptr;
};

// Gradients of one expert in the same shapes; elements as GradientMode says. A null pointer is a gradient nobody needs;
// that holds for all experts alike, and for w1 and w3 together.
struct ExpertGradients {
  void* w1 = nullptr;
  void* w3 = nullptr;
  void* w2 = nullptr;
};

enum class GradientMode {
  kWriteBf16,
  kWriteFp32,
  kAccumulateBf16,  // adds to what is there: one fp32 addition, one rounding
  kAccumulateFp32,
};

// What forward leaves for backward. The caller owns the memory; see Workspace::saved_rows().
struct SavedTensors {
  bf16* gate_up = nullptr;         // [saved_rows, 2I] g, then u, of each routed row
  bf16* x = nullptr;               // [saved_rows, H], with keep_x
  bf16* shared_gate_up = nullptr;  // [tokens, 2Is], with a shared expert
};

// One rank's tensors of a pass. `experts` has E / R entries.
struct ForwardInputs {
  const std::int32_t* schedule = nullptr;  // [schedule_words()] from build_schedule
  const bf16* x = nullptr;                 // [tokens, H]
  const float* topk_weights = nullptr;     // [tokens, K]
  std::vector<ExpertWeights> experts;
  ExpertWeights shared;  // w1, w3 [Is, H], w2 [H, Is]
  bf16* out = nullptr;   // [tokens, H]
  SavedTensors saved;    // null pointers: nothing is saved
};

struct BackwardInputs {
  const std::int32_t* schedule = nullptr;
  const bf16* x = nullptr;
  const bf16* dout = nullptr;  // [tokens, H]
  const float* topk_weights = nullptr;
  std::vector<ExpertWeights> experts;
  ExpertWeights shared;
  SavedTensors saved;
  bf16* dx = nullptr;              // [tokens, H], or null
  float* dtopk_weights = nullptr;  // [tokens, K], or null
  std::vector<ExpertGradients> expert_gradients;
  ExpertGradients shared_gradients;  // of this rank's own tokens
};

class CLOWDER_API Workspace {
 public:
  // Collective over the group. Throws Error(kArgument) that names the argument, and Error(kUnsupported) for an engine
  // that this build or this machine lacks.
  Workspace(const LayerShape& shape, std::shared_ptr<Group> group, const WorkspaceOptions& options = {});
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  const LayerShape& shape() const;
  const Group& group() const;
  std::int64_t ring_rows() const;
  std::int64_t saved_rows() const;
  // Length in int32 of one rank's schedule.
  std::int64_t schedule_words() const;
  // What one rank's part of the symmetric memory takes, for caller-owned groups.
  static std::size_t symmetric_bytes(const LayerShape& shape, int num_ranks, EngineKind engine = EngineKind::kCpu);
  // The smallest ring of an engine, in rows.
  static std::int64_t min_ring_rows(EngineKind engine = EngineKind::kCpu);

  // Collective. Writes each local rank's schedule into schedules[i], [schedule_words()] int32. It is the caller's: it
  // serves any number of passes, in any order, also beside other schedules.
  void build_schedule(const std::vector<ExpertIds>& ids, const std::vector<std::int32_t*>& schedules,
                      Stream stream = nullptr);

  // Collective. x may be overwritten after its backward (after forward where no backward will run).
  void forward(const std::vector<ForwardInputs>& ranks, Stream stream = nullptr);

  // Collective.
  void backward(const std::vector<BackwardInputs>& ranks, GradientMode mode, Stream stream = nullptr);

  // A workspace dies when a wait runs out of time or a task fails. From then on every call throws what killed it; this
  // tells before one is made.
  bool is_dead() const;
  // Throws what killed this workspace, if it is dead.
  void check() const;
  // Of the pass that killed this workspace; empty while it lives.
  const std::vector<WaitReport>& wait_reports() const;

 private:
  class Implementation;
  std::unique_ptr<Implementation> implementation_;
};

// Readings of a schedule that build_schedule wrote, in host memory.
struct ScheduleSummary {
  std::int64_t skipped_ids = 0;             // of all ranks
  std::int64_t rows = 0;                    // that this rank receives
  std::vector<std::int64_t> tokens;         // [R] of each rank
  std::vector<std::int64_t> expert_counts;  // [E] rows of every expert of the group
};
// Throws Error(kArgument) for memory that holds no schedule of this layer.
CLOWDER_API ScheduleSummary summarise(const LayerShape& shape, int num_ranks, const std::int32_t* schedule);

}  // namespace clowder

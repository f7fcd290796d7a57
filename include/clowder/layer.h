// The expert-parallel MoE layer for C++ users: a Workspace, and the three passes that run on it.
//
//   Workspace workspace(shape, group);
//   workspace.build_schedule(ids);          // once a step
//   workspace.forward(inputs);              // reads the schedule
//   workspace.backward(inputs);             // reads the schedule and what forward saved
//
// Pointers are the caller's and must stay valid during the call. All matrices are row-major and contiguous. A vector
// of per-rank arguments has one entry for each of group.local_ranks(), in that order. One call at a time may run on a
// workspace; calls return when the pass has ended.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "clowder/group.h"
#include "clowder/status.h"
#include "clowder/types.h"

namespace clowder {

// What an engine records of its workers; src/observe/timeline.h has it, for Clowder's own tools.
class Timeline;

// Tuning and limits. None of them changes a bit of any result.
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

class Workspace {
 public:
  // Collective over the group. Throws Error(kArgument) that names the argument.
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
  static std::size_t symmetric_bytes(const LayerShape& shape, int num_ranks);
  // The smallest ring of this engine, in rows.
  static std::int64_t min_ring_rows();

  // Collective. Writes each local rank's schedule into schedules[i], [schedule_words()] int32. It is the caller's: it
  // serves any number of passes, in any order, also beside other schedules.
  void build_schedule(const std::vector<ExpertIds>& ids, const std::vector<std::int32_t*>& schedules);

  // Collective. x may be overwritten after its backward (after forward where no backward will run).
  void forward(const std::vector<ForwardInputs>& ranks);

  // Collective.
  void backward(const std::vector<BackwardInputs>& ranks, GradientMode mode);

  // A workspace dies when a wait runs out of time or a task fails. From then on every call throws what killed it; this
  // tells before one is made.
  bool is_dead() const;
  // Throws what killed this workspace, if it is dead.
  void check() const;
  const std::vector<WaitReport>& wait_reports() const;

 private:
  class Implementation;
  std::unique_ptr<Implementation> implementation_;
};

// Readings of a schedule that build_schedule wrote.
struct ScheduleSummary {
  std::int64_t skipped_ids = 0;             // of all ranks
  std::int64_t rows = 0;                    // that this rank receives
  std::vector<std::int64_t> tokens;         // [R] of each rank
  std::vector<std::int64_t> expert_counts;  // [E] rows of every expert of the group
};
// Throws Error(kArgument) for memory that holds no schedule of this layer.
ScheduleSummary summarise(const LayerShape& shape, int num_ranks, const std::int32_t* schedule);

}  // namespace clowder

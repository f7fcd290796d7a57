// A Workspace of virtual ranks for Python: addresses and counts come in, per-rank arguments go to the engine. The
// Python side has checked shapes, types and contiguity; this side refuses null where the engine would read or write.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "clowder/layer.h"

namespace clowder::python {

// The address of a tensor's first element; 0 is a tensor that is absent or empty.
using Address = std::uintptr_t;

// Where equal matrices lie: the address of each, or the first's and the bytes from one to the next. None: nowhere.
struct Matrices {
  std::vector<Address> addresses;
  std::int64_t stride = 0;

  Address of(std::size_t i) const;
  bool exist() const { return !addresses.empty() && addresses.front() != 0; }
};

// Weights are the global ones, in global expert order; the shared expert's are one matrix each, or none.
struct WeightAddresses {
  Matrices w1, w3;                // E of [I, H] bf16: gate, up
  Matrices w2;                    // E of [H, I] bf16
  Matrices shared_w1, shared_w3;  // [Is, H] bf16
  Matrices shared_w2;             // [H, Is] bf16
};

struct SavedAddresses {
  Address gate_up = 0;         // [R, saved_rows, 2I] bf16
  Address x = 0;               // [R, saved_rows, H] bf16, with keep_x
  Address shared_gate_up = 0;  // [tokens, 2Is] bf16
};

// 0, or no matrices, is a gradient that nobody needs. Those of weights have elements of the pass's GradientMode.
struct GradientAddresses {
  Address x = 0;                  // [tokens, H] bf16
  Address topk_weights = 0;       // [tokens, K] fp32
  Matrices w1, w3;                // E of [I, H]
  Matrices w2;                    // E of [H, I]
  Matrices shared_w1, shared_w3;  // R of [Is, H], of each rank's own tokens
  Matrices shared_w2;             // R of [H, Is]
};

// The inputs of one pass over all ranks: the ranks' tokens stand one after the other.
struct PassAddresses {
  std::vector<std::int64_t> tokens_per_rank;
  Address schedule = 0;      // [R, schedule_words] int32
  Address x = 0;             // [tokens, H] bf16
  Address topk_weights = 0;  // [tokens, K] fp32
  WeightAddresses weights;
  SavedAddresses saved;
};

class VirtualWorkspace {
 public:
  VirtualWorkspace(const LayerShape& shape, int num_ranks, const WorkspaceOptions& options);

  // Writes [R, schedule_words] int32 at `schedule` and [E] int64 at `expert_counts`; returns the ids skipped.
  std::int64_t build_schedule(Address topk_idx, bool is_int64, const std::vector<std::int64_t>& tokens_per_rank,
                              Address schedule, Address expert_counts);
  // `out` [tokens, H] bf16. Saves where `save` is set and the addresses of pass.saved say.
  void forward(const PassAddresses& pass, bool save, Address out);
  void backward(const PassAddresses& pass, Address dout, const GradientAddresses& gradients, GradientMode mode);

  std::int64_t ring_rows() const { return workspace_.ring_rows(); }
  std::int64_t saved_rows() const { return workspace_.saved_rows(); }
  std::int64_t schedule_words() const { return workspace_.schedule_words(); }
  // Throws what killed the workspace, if it is dead.
  void check_alive() const { workspace_.check(); }

 private:
  void check(const PassAddresses& pass) const;
  std::vector<ExpertWeights> rank_experts(const WeightAddresses& weights, int rank) const;
  ExpertWeights shared_expert(const WeightAddresses& weights) const;
  SavedTensors rank_saved(const SavedAddresses& saved, int rank, std::int64_t first_token) const;

  int num_ranks_;
  Workspace workspace_;
  std::mutex one_call_at_a_time_;  // the interpreter's lock is released during a call
};

// As model/activation/name.h has them; throws Error(kArgument) for others.
Activation parse_activation_name(const std::string& name);

}  // namespace clowder::python

// What the task bodies of both directions share: a rank's view of a pass, its row blocks, pulls, pushes, and gate/up
// tiles.
#pragma once

#include <vector>

#include "clowder/layer.h"
#include "engine/cpu/kernels.h"
#include "engine/cpu/launch.h"
#include "engine/cpu/rank_buffers.h"
#include "engine/cpu/tiles.h"
#include "plan/schedule.h"

namespace clowder::cpu {

// The rows of one tile, lane by lane.
template <class T>
struct Rows {
  T* at[kLanes] = {};
  int count = 0;

  template <class U>
  requires std::is_convertible_v<T*, U*>
  operator Rows<U>() const {
    Rows<U> result;
    result.count = count;
    for (int i = 0; i < count; ++i) result.at[i] = at[i];
    return result;
  }

  Rows columns_from(std::int64_t column) const {
    Rows moved = *this;
    for (int i = 0; i < count; ++i) moved.at[i] += column;
    return moved;
  }
};

// `count` consecutive rows of a matrix.
template <class T>
Rows<T> consecutive_rows(T* first, std::int64_t stride, int count) {
  Rows<T> rows;
  rows.count = count;
  for (int i = 0; i < count; ++i) rows.at[i] = first + i * stride;
  return rows;
}

// One rank of a launch.
struct RankView {
  const plan::RankPass* pass = nullptr;
  plan::ConstSchedule schedule;
  RankBuffers* buffers = nullptr;
};

// A row block of a rank, or of its tokens.
struct Block {
  std::int64_t first_row;  // in the schedule, or the first token
  int count;               // real rows
  std::int64_t ring_row;   // first row of its ring slot
};

class PassTasks : public TaskBodies {
 protected:
  PassTasks(const LayerShape& shape, const PassPlan& plan, const std::vector<RankMemory>& memory,
            std::vector<RankView> ranks)
      : shape_(shape), pass_(plan.shape()), memory_(memory), ranks_(std::move(ranks)), kernels_(kernels()) {}

  bool has_peers() const { return memory_.size() > 1; }
  const RankView& view(const plan::Task& task) const { return ranks_[static_cast<std::size_t>(task.rank())]; }
  const RankMemory& own_memory(const RankView& rank) const {
    return memory_[static_cast<std::size_t>(rank.pass->rank)];
  }
  std::int64_t num_tokens(const RankView& rank) const { return rank.pass->num_tokens; }

  Block row_block(const RankView& rank, std::int32_t block) const;
  // Of the expert, among its rank's `experts`, whose rows the task's block holds.
  const ExpertWeights& block_weights(const std::vector<ExpertWeights>& experts, const plan::Task& task) const {
    return experts[static_cast<std::size_t>(view(task).pass->blocks.block_expert[task.block])];
  }
  Block token_block(const RankView& rank, std::int32_t block) const;

  // Where row i of the block comes from and goes back to.
  plan::RowSource source(const RankView& rank, const Block& block, int i) const {
    return rank.schedule.source(block.first_row + i);
  }
  // The block's rows of a staged [tokens, H] tensor.
  template <class Staged>
  Rows<const bf16> source_rows(const RankView& rank, const Block& block, const Staged& staged_of) const {
    Rows<const bf16> rows;
    rows.count = block.count;
    for (int i = 0; i < block.count; ++i) {
      const plan::RowSource from = source(rank, block, i);
      rows.at[i] = staged_of(from.rank) + from.slot / shape_.topk * shape_.hidden;
    }
    return rows;
  }
  // The slots, at their sources, that the block's results are pushed to.
  Rows<bf16> slot_rows(const RankView& rank, const Block& block) const;

  void copy_rows(const Rows<const bf16>& from, std::int64_t width, const Rows<bf16>& to) const;

  // sums[n][lane] = the chain of products of rows (all `terms` of them) with the weights, from zero.
  void product(const Rows<const bf16>& rows, const WeightView& weights, int terms, int outputs, const Scratch& scratch,
               float* sums) const;

  // g and u (where given) and h of a row block's columns [tile]. `width` is I or Is.
  void gate_up_tile(const Rows<const bf16>& x, const ExpertWeights& weights, std::int64_t width, const Range& tile,
                    const Rows<bf16>* gate_up, const Rows<bf16>* h, const Scratch& scratch) const;

  // The columns of out or dx that a sum task owns: all of them, but for a shared expert.
  Range sum_columns(int tile) const;
  // A token block's out or dx: the shared expert's part, if there is one, which stands in scratch.sums, plus the
  // tokens' slots in order. `weights` null: all ones.
  void sum_slots(const RankView& rank, const Block& block, const float* weights, const Range& columns,
                 const Scratch& scratch, bf16* out) const;

  const LayerShape& shape_;
  const plan::PassShape& pass_;
  const std::vector<RankMemory>& memory_;
  std::vector<RankView> ranks_;
  const Kernels& kernels_;
};

}  // namespace clowder::cpu

#include "engine/cpu/engine.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <thread>

#include "engine/arguments.h"
#include "engine/cpu/arguments.h"
#include "engine/cpu/backward_tasks.h"
#include "engine/cpu/forward_tasks.h"
#include "engine/cpu/launch.h"
#include "engine/cpu/schedule_tasks.h"
#include "engine/death.h"
#include "model/gradient_mode.h"

namespace clowder::cpu {
namespace {

EngineLimits limits(const LayerShape& shape) {
  constexpr std::int64_t kChunkRows = 256;
  const auto cores = static_cast<std::int32_t>(std::thread::hardware_concurrency());
  return {kBlockRows, kChunkRows, std::max(1, cores), make_tile_counts(shape)};
}

// Outputs become NaN before a pass that is to write all of them.
void poison(void* memory, std::int64_t elements, std::size_t element_bytes) {
  if (memory != nullptr) std::memset(memory, 0xff, static_cast<std::size_t>(elements) * element_bytes);
}

class CpuEngine : public Engine {
 public:
  CpuEngine(const LayerShape& shape, std::shared_ptr<Group> group, const WorkspaceOptions& options)
      : Engine(shape, std::move(group)),
        shape_(Engine::shape()),
        group_(own_group()),
        options_(resolve_options(shape_, group_.size(), options, limits(shape_))),
        schedule_shape_(plan::make_schedule_shape(shape_, group_.size())),
        buffers_(group_.local_ranks().size()) {
    // Collective calls come last: whoever fails before has told no peer to wait.
    kernels();
    ring_ = plan::make_ring(kBlockRows, options_.ring_rows, options_.chunk_rows);
    scratch_.reserve(options_.blocks, std::max({shape_.hidden, 2 * shape_.intermediate, 2 * shape_.shared_intermediate,
                                                std::int64_t{kWeightRun}}));
    const SymmetricLayout layout(shape_, group_.size());
    symmetric_memory_ = group_.allocate(layout.bytes());
    for (int rank = 0; rank < group_.size(); ++rank) {
      memory_.push_back(layout.view(checked_base(symmetric_memory_.get(), rank)));
    }
  }

  std::int64_t ring_rows() const override { return std::int64_t{ring_.ring_blocks} * ring_.block_rows; }
  std::int64_t saved_rows() const override { return options_.saved_rows; }
  std::int64_t schedule_words() const override { return schedule_shape_.words(); }
  bool is_dead() const override { return death_.has_come(); }
  void check() const override { death_.check(); }
  const std::vector<WaitReport>& wait_reports() const override { return death_.reports(); }

  void build_schedule(const std::vector<ExpertIds>& ids, const std::vector<std::int32_t*>& schedules, Stream) override {
    if (options_.poison) {
      for (std::int32_t* schedule : schedules) poison(schedule, schedule_words(), sizeof(std::int32_t));
    }
    const PassPlan plan(group_.local_ranks());
    ScheduleTasks tasks(schedule_shape_, memory_, group_.local_ranks(), schedule_epoch_ + 1, ids, schedules);
    launch(plan, schedule_epoch_, tasks);
  }

  void forward(const std::vector<ForwardInputs>& ranks, Stream) override {
    const auto schedules = checked_schedules(ranks);
    for (std::size_t i = 0; i < ranks.size(); ++i) check_token_tensors(ranks[i], schedules[i]);
    const PassPlan plan(pass_shape(plan::Pass::kForward, are_rows_saved(ranks, options_)), schedules);
    for (RankBuffers& buffers : buffers_) buffers.reserve_forward(shape_, ring_rows());
    if (options_.poison) poison_forward(ranks, schedules);
    ForwardTasks tasks(shape_, plan, memory_, rank_views(plan, schedules), ranks);
    launch(plan, layer_epoch_, tasks);
  }

  void backward(const std::vector<BackwardInputs>& ranks, GradientMode mode, Stream) override {
    const auto schedules = checked_schedules(ranks);
    std::vector<bool> has_use;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      check_token_tensors(shape_, ranks[i], schedules[i]);
      has_use.push_back(has_tokens(schedules[i]));
    }
    plan::PassShape pass = pass_shape(plan::Pass::kBackward, are_rows_saved(ranks, options_));
    pass.needs = find_needs(shape_, group_, ranks, has_use);
    const PassPlan plan(pass, schedules);
    for (RankBuffers& buffers : buffers_) buffers.reserve_backward(shape_, pass);
    if (options_.poison) poison_backward(ranks, schedules, mode);
    BackwardTasks tasks(shape_, plan, memory_, rank_views(plan, schedules), ranks, mode);
    launch(plan, layer_epoch_, tasks);
  }

 private:
  template <class Inputs>
  std::vector<plan::ConstSchedule> checked_schedules(const std::vector<Inputs>& ranks) const {
    std::vector<plan::ConstSchedule> schedules;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      schedules.push_back(checked_schedule(schedule_shape_, group_.local_ranks()[i], ranks[i].schedule));
    }
    return schedules;
  }

  plan::PassShape pass_shape(plan::Pass pass, bool has_saved_rows) const {
    plan::PassShape result;
    result.pass = pass;
    result.ring = ring_;
    result.saved_rows = has_saved_rows ? options_.saved_rows : 0;
    result.has_shared = shape_.shared_intermediate > 0;
    result.keep_x = options_.keep_x;
    result.tiles = make_tile_counts(shape_);
    return result;
  }

  std::vector<RankView> rank_views(const PassPlan& plan, const std::vector<plan::ConstSchedule>& schedules) {
    std::vector<RankView> views;
    for (std::size_t i = 0; i < schedules.size(); ++i) {
      views.push_back({&plan.ranks()[i], schedules[i], &buffers_[i]});
    }
    return views;
  }

  // Runs the pass after `epoch`, and counts it.
  void launch(const PassPlan& plan, std::uint32_t& epoch, TaskBodies& tasks) {
    const std::uint64_t jitter_seed = options_.jitter_seed == 0 ? 0 : options_.jitter_seed + epoch;
    Launch launch(plan, memory_, epoch + 1, scratch_,
                  {options_.blocks, options_.timeout_s, jitter_seed, options_.timeline});
    ++epoch;
    try {
      launch.run(tasks);
    } catch (const std::bad_alloc&) {
      die(Error(ErrorCode::kUnsupported, "a pass ran out of memory"));
    } catch (const std::exception& error) {
      die(Error(ErrorCode::kInternal, std::string("a task failed: ") + error.what()));
    }
    const std::vector<WaitReport> reports = launch.reports();
    if (!reports.empty()) die(Error(ErrorCode::kTimeout, to_string(reports.front())), reports);
  }

  [[noreturn]] void die(const Error& why, const std::vector<WaitReport>& reports = {}) {
    death_.record(why, reports);
    throw why;
  }

  // A rank's own part of the symmetric memory may be poisoned before its pass: peers write to it, and read it, only
  // after its next flag.
  void poison_workspace() {
    for (RankBuffers& buffers : buffers_) buffers.poison();
    scratch_.poison();
    const std::int64_t slots = shape_.max_tokens * shape_.topk;
    for (const int rank : group_.local_ranks()) {
      const RankMemory& own = memory_[static_cast<std::size_t>(rank)];
      poison(own.slots, slots * shape_.hidden, sizeof(bf16));
      poison(own.dw, slots, sizeof(float));
      if (group_.size() == 1) continue;
      poison(own.x, shape_.max_tokens * shape_.hidden, sizeof(bf16));
      poison(own.dy, shape_.max_tokens * shape_.hidden, sizeof(bf16));
      poison(own.weights, slots, sizeof(float));
    }
  }

  void poison_forward(const std::vector<ForwardInputs>& ranks, const std::vector<plan::ConstSchedule>& schedules) {
    poison_workspace();
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      const std::int64_t tokens = schedules[i].tokens[*schedules[i].rank];
      poison(ranks[i].out, tokens * shape_.hidden, sizeof(bf16));
      poison(ranks[i].saved.gate_up, options_.saved_rows * 2 * shape_.intermediate, sizeof(bf16));
      poison(ranks[i].saved.shared_gate_up, tokens * 2 * shape_.shared_intermediate, sizeof(bf16));
      if (options_.keep_x) poison(ranks[i].saved.x, options_.saved_rows * shape_.hidden, sizeof(bf16));
    }
  }

  void poison_backward(const std::vector<BackwardInputs>& ranks, const std::vector<plan::ConstSchedule>& schedules,
                       GradientMode mode) {
    poison_workspace();
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      const std::int64_t tokens = schedules[i].tokens[*schedules[i].rank];
      poison(ranks[i].dx, tokens * shape_.hidden, sizeof(bf16));
      poison(ranks[i].dtopk_weights, tokens * shape_.topk, sizeof(float));
      if (is_accumulating(mode)) continue;
      const std::size_t bytes = gradient_bytes(mode);
      for (const ExpertGradients& expert : ranks[i].expert_gradients) {
        poison_gradients(expert, shape_.intermediate, bytes);
      }
      poison_gradients(ranks[i].shared_gradients, shape_.shared_intermediate, bytes);
    }
  }

  void poison_gradients(const ExpertGradients& gradients, std::int64_t width, std::size_t bytes) const {
    for (void* gradient : {gradients.w1, gradients.w3, gradients.w2}) poison(gradient, width * shape_.hidden, bytes);
  }

  const LayerShape& shape_;
  Group& group_;
  WorkspaceOptions options_;
  plan::ScheduleShape schedule_shape_;
  plan::RingShape ring_;
  std::shared_ptr<SymmetricMemory> symmetric_memory_;
  std::vector<RankMemory> memory_;    // of every rank of the group
  std::vector<RankBuffers> buffers_;  // of the local ranks
  ScratchPool scratch_;
  std::uint32_t schedule_epoch_ = 0;  // counts schedule passes
  std::uint32_t layer_epoch_ = 0;     // counts forward and backward passes
  Death death_;
};

std::unique_ptr<Engine> make_engine(const LayerShape& shape, std::shared_ptr<Group> group,
                                    const WorkspaceOptions& options) {
  return std::make_unique<CpuEngine>(shape, std::move(group), options);
}

std::size_t symmetric_bytes(const LayerShape& shape, int num_ranks) {
  return SymmetricLayout(shape, num_ranks).bytes();
}

std::int64_t min_ring_rows() { return plan::min_ring_rows(kBlockRows); }

bool is_usable() { return true; }

}  // namespace

const EngineType kEngineType = {make_engine, symmetric_bytes, min_ring_rows, is_usable};

}  // namespace clowder::cpu

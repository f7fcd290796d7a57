#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <new>
#include <optional>

#include "clowder/layer.h"
#include "engine/cpu/arguments.h"
#include "engine/cpu/backward_tasks.h"
#include "engine/cpu/forward_tasks.h"
#include "engine/cpu/launch.h"
#include "engine/cpu/schedule_tasks.h"
#include "model/gradient_mode.h"
#include "model/shape.h"

namespace clowder {
namespace {

plan::ScheduleShape schedule_shape(const LayerShape& shape, int num_ranks) {
  return {num_ranks, shape.num_experts, shape.topk, static_cast<std::int32_t>(shape.max_tokens)};
}

const LayerShape& validated(const LayerShape& shape, const Group* group) {
  if (group == nullptr) throw Error(ErrorCode::kArgument, "group: a null pointer, must be a group");
  validate(shape, group->size());
  return shape;
}

// Outputs become NaN before a pass that is to write all of them.
void poison(void* memory, std::int64_t elements, std::size_t element_bytes) {
  if (memory != nullptr) std::memset(memory, 0xff, static_cast<std::size_t>(elements) * element_bytes);
}

}  // namespace

class Workspace::Implementation {
 public:
  Implementation(const LayerShape& shape, std::shared_ptr<Group> group, const WorkspaceOptions& options)
      : shape_(validated(shape, group.get())),
        group_(std::move(group)),
        options_(cpu::resolve_options(shape_, group_->size(), options)),
        schedule_shape_(schedule_shape(shape_, group_->size())),
        buffers_(group_->local_ranks().size()) {
    // Collective calls come last: whoever fails before has told no peer to wait.
    cpu::kernels();
    ring_ = plan::make_ring(cpu::kBlockRows, options_.ring_rows, options_.chunk_rows);
    scratch_.reserve(options_.blocks, std::max({shape_.hidden, 2 * shape_.intermediate, 2 * shape_.shared_intermediate,
                                                std::int64_t{cpu::kWeightRun}}));
    const cpu::SymmetricLayout layout(shape_, group_->size());
    symmetric_memory_ = group_->allocate(layout.bytes());
    for (int rank = 0; rank < group_->size(); ++rank) memory_.push_back(layout.view(symmetric_memory_->base(rank)));
  }

  const LayerShape& shape() const { return shape_; }
  const Group& group() const { return *group_; }
  std::int64_t ring_rows() const { return std::int64_t{ring_.ring_blocks} * ring_.block_rows; }
  std::int64_t saved_rows() const { return options_.saved_rows; }
  std::int64_t schedule_words() const { return schedule_shape_.words(); }
  bool is_dead() const { return is_dead_.load(std::memory_order_acquire); }
  const std::vector<WaitReport>& wait_reports() const { return wait_reports_; }

  void check() const {
    if (!is_dead()) return;
    throw Error(death_->code(), std::string("the workspace is dead, make a new one on every rank: ") + death_->what());
  }

  void build_schedule(const std::vector<ExpertIds>& ids, const std::vector<std::int32_t*>& schedules) {
    const std::lock_guard lock(one_call_at_a_time_);
    check();
    cpu::check_ids(shape_, buffers_.size(), ids, schedules);
    if (options_.poison) {
      for (std::int32_t* schedule : schedules) poison(schedule, schedule_words(), sizeof(std::int32_t));
    }
    const cpu::PassPlan plan(group_->local_ranks());
    cpu::ScheduleTasks tasks(schedule_shape_, memory_, group_->local_ranks(), schedule_epoch_ + 1, ids, schedules);
    launch(plan, schedule_epoch_, tasks);
  }

  void forward(const std::vector<ForwardInputs>& ranks) {
    const std::lock_guard lock(one_call_at_a_time_);
    check();
    const auto schedules = checked_schedules("ranks", ranks);
    std::vector<const SavedTensors*> saved;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      cpu::check_forward(shape_, ranks[i], schedules[i]);
      saved.push_back(&ranks[i].saved);
    }
    const cpu::PassPlan plan(pass_shape(plan::Pass::kForward, saved), schedules);
    for (cpu::RankBuffers& buffers : buffers_) buffers.reserve_forward(shape_, ring_rows());
    if (options_.poison) poison_forward(ranks, schedules);
    cpu::ForwardTasks tasks(shape_, plan, memory_, rank_views(plan, schedules), ranks);
    launch(plan, layer_epoch_, tasks);
  }

  void backward(const std::vector<BackwardInputs>& ranks, GradientMode mode) {
    const std::lock_guard lock(one_call_at_a_time_);
    check();
    const auto schedules = checked_schedules("ranks", ranks);
    std::vector<const SavedTensors*> saved;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      cpu::check_backward(shape_, ranks[i], schedules[i]);
      saved.push_back(&ranks[i].saved);
    }
    plan::PassShape pass = pass_shape(plan::Pass::kBackward, saved);
    const bool has_distant_peers = static_cast<int>(buffers_.size()) < group_->size();
    pass.needs = cpu::find_needs(shape_, ranks, schedules, has_distant_peers);
    const cpu::PassPlan plan(pass, schedules);
    for (cpu::RankBuffers& buffers : buffers_) buffers.reserve_backward(shape_, pass);
    if (options_.poison) poison_backward(ranks, schedules, mode);
    cpu::BackwardTasks tasks(shape_, plan, memory_, rank_views(plan, schedules), ranks, mode);
    launch(plan, layer_epoch_, tasks);
  }

 private:
  template <class Inputs>
  std::vector<plan::ConstSchedule> checked_schedules(const char* name, const std::vector<Inputs>& ranks) const {
    cpu::check_count(name, ranks.size(), buffers_.size());
    std::vector<plan::ConstSchedule> schedules;
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      schedules.push_back(cpu::checked_schedule(schedule_shape_, group_->local_ranks()[i], ranks[i].schedule));
    }
    return schedules;
  }

  plan::PassShape pass_shape(plan::Pass pass, const std::vector<const SavedTensors*>& saved) const {
    plan::PassShape result;
    result.pass = pass;
    result.ring = ring_;
    result.saved_rows = cpu::are_rows_saved(saved, options_.saved_rows, options_.keep_x) ? options_.saved_rows : 0;
    result.has_shared = shape_.shared_intermediate > 0;
    result.keep_x = options_.keep_x;
    result.tiles = cpu::make_tile_counts(shape_);
    return result;
  }

  std::vector<cpu::RankView> rank_views(const cpu::PassPlan& plan, const std::vector<plan::ConstSchedule>& schedules) {
    std::vector<cpu::RankView> views;
    for (std::size_t i = 0; i < schedules.size(); ++i) {
      views.push_back({&plan.ranks()[i], schedules[i], &buffers_[i]});
    }
    return views;
  }

  // Runs the pass after `epoch`, and counts it.
  void launch(const cpu::PassPlan& plan, std::uint32_t& epoch, cpu::TaskBodies& tasks) {
    const std::uint64_t jitter_seed = options_.jitter_seed == 0 ? 0 : options_.jitter_seed + epoch;
    cpu::Launch launch(plan, memory_, epoch + 1, scratch_,
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
    if (reports.empty()) return;
    wait_reports_ = reports;
    die(Error(ErrorCode::kTimeout, to_string(reports.front())));
  }

  [[noreturn]] void die(const Error& why) {
    death_ = why;
    is_dead_.store(true, std::memory_order_release);
    throw why;
  }

  // A rank's own part of the symmetric memory may be poisoned before its pass: peers write to it, and read it, only
  // after its next flag.
  void poison_workspace() {
    for (cpu::RankBuffers& buffers : buffers_) buffers.poison();
    scratch_.poison();
    const std::int64_t slots = shape_.max_tokens * shape_.topk;
    for (const int rank : group_->local_ranks()) {
      const cpu::RankMemory& own = memory_[static_cast<std::size_t>(rank)];
      poison(own.slots, slots * shape_.hidden, sizeof(bf16));
      poison(own.dw, slots, sizeof(float));
      if (group_->size() == 1) continue;
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

  LayerShape shape_;
  std::shared_ptr<Group> group_;
  WorkspaceOptions options_;
  plan::ScheduleShape schedule_shape_;
  plan::RingShape ring_;
  std::shared_ptr<SymmetricMemory> symmetric_memory_;
  std::vector<cpu::RankMemory> memory_;    // of every rank of the group
  std::vector<cpu::RankBuffers> buffers_;  // of the local ranks
  cpu::ScratchPool scratch_;

  std::mutex one_call_at_a_time_;
  std::uint32_t schedule_epoch_ = 0;  // counts schedule passes
  std::uint32_t layer_epoch_ = 0;     // counts forward and backward passes
  std::atomic<bool> is_dead_{false};
  std::optional<Error> death_;  // set before is_dead_, and never again
  std::vector<WaitReport> wait_reports_;
};

Workspace::Workspace(const LayerShape& shape, std::shared_ptr<Group> group, const WorkspaceOptions& options)
    : implementation_(std::make_unique<Implementation>(shape, std::move(group), options)) {}
Workspace::~Workspace() = default;

const LayerShape& Workspace::shape() const { return implementation_->shape(); }
const Group& Workspace::group() const { return implementation_->group(); }
std::int64_t Workspace::ring_rows() const { return implementation_->ring_rows(); }
std::int64_t Workspace::saved_rows() const { return implementation_->saved_rows(); }
std::int64_t Workspace::schedule_words() const { return implementation_->schedule_words(); }
std::size_t Workspace::symmetric_bytes(const LayerShape& shape, int num_ranks) {
  validate(shape, num_ranks);
  return cpu::SymmetricLayout(shape, num_ranks).bytes();
}
std::int64_t Workspace::min_ring_rows() { return plan::min_ring_rows(cpu::kBlockRows); }
bool Workspace::is_dead() const { return implementation_->is_dead(); }
void Workspace::check() const { implementation_->check(); }
const std::vector<WaitReport>& Workspace::wait_reports() const { return implementation_->wait_reports(); }

void Workspace::build_schedule(const std::vector<ExpertIds>& ids, const std::vector<std::int32_t*>& schedules) {
  implementation_->build_schedule(ids, schedules);
}
void Workspace::forward(const std::vector<ForwardInputs>& ranks) { implementation_->forward(ranks); }
void Workspace::backward(const std::vector<BackwardInputs>& ranks, GradientMode mode) {
  implementation_->backward(ranks, mode);
}

ScheduleSummary summarise(const LayerShape& shape, int num_ranks, const std::int32_t* schedule) {
  const plan::ConstSchedule view = plan::view_schedule(schedule_shape(shape, num_ranks), schedule);
  if (*view.signature != view.shape.signature()) {
    throw Error(ErrorCode::kArgument, "schedule: not one of this layer, must be what build_schedule wrote");
  }
  ScheduleSummary summary;
  summary.skipped_ids = *view.skipped_ids;
  summary.rows = view.num_rows();
  summary.tokens.assign(view.tokens, view.tokens + num_ranks);
  summary.expert_counts.assign(view.expert_counts, view.expert_counts + shape.num_experts);
  return summary;
}

}  // namespace clowder

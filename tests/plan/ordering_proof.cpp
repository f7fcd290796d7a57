#include "ordering_proof.h"

#include <algorithm>
#include <array>
#include <unordered_map>
#include <vector>

#include "accesses.h"
#include "launch_plan.h"
#include "memory_model.h"
#include "plan/dependencies.h"

namespace clowder::plan::explore {
namespace {

constexpr std::size_t kMostNodes = 4096;
constexpr std::int32_t kNobody = -1;

using NodeSet = std::array<std::uint64_t, kMostNodes / 64>;

enum class Progress : std::int32_t { kUntouched, kUnderWay, kDone };

// A task, or the host of a launch before or after it.
struct Node {
  std::int32_t pass = 0;
  std::int32_t group = 0;
  bool is_host = false;
  Task task;
  Progress progress = Progress::kUntouched;
  std::vector<std::int32_t> after;         // nodes that have ended when this one begins
  std::vector<std::int32_t> after_begins;  // nodes that have begun, of mutants that signal early
};

// Who has touched a cell since it was last written.
struct History {
  std::int32_t writer = kNobody;
  std::vector<std::int32_t> readers;
};

struct Launch {
  LaunchPlan plan;
  std::vector<PassContext> contexts;
  std::int32_t begin = 0;  // host nodes
  std::int32_t end = 0;
};

}  // namespace

class OrderingProver::Proof {
 public:
  Result run(const PlanSpec& spec, const Mutant& mutant) {
    spec_ = &spec;
    mutant_ = &mutant;
    reset();
    Result result;
    try {
      for (std::size_t pass = 0; pass < spec.program.size(); ++pass) {
        add_pass(static_cast<std::int32_t>(pass));
        if (num_nodes_ > kMostNodes) return Result{};
        run_pass();
      }
    } catch (const Violation& violation) {
      result.failed = true;
      result.what = describe(spec) + ": " + describe_node(current_) + " " + violation.what();
    }
    result.tasks = static_cast<std::int64_t>(num_nodes_);
    return result;
  }

 private:
  void reset() {
    memory_.allocate(*spec_);
    histories_.clear();
    num_nodes_ = 0;
    current_ = kNobody;
    schedule_epoch_ = 0;
    launches_.resize(std::max(launches_.size(), static_cast<std::size_t>(spec_->num_groups())));
    build_schedules();
  }

  void build_schedules() {
    schedules_.resize(spec_->steps.size() * num_ranks());
    for (std::size_t step = 0; step < spec_->steps.size(); ++step) {
      const Routing& routing = spec_->steps[step];
      std::vector<const std::int32_t*> ids;
      for (const std::vector<std::int32_t>& of_rank : routing.topk_idx) ids.push_back(of_rank.data());
      for (std::size_t r = 0; r < num_ranks(); ++r) {
        std::vector<std::int32_t>& words = schedules_[step * num_ranks() + r];
        words.assign(static_cast<std::size_t>(spec_->schedule.words()), INT32_MIN / 2);
        Schedule schedule = view_schedule(spec_->schedule, words.data());
        build_schedule(static_cast<std::int32_t>(r), ExchangedIds{ids.data(), routing.tokens.data()}, schedule);
      }
    }
  }

  ConstSchedule schedule_of(std::int32_t step, std::int32_t rank) const {
    const std::size_t index = static_cast<std::size_t>(step) * num_ranks() + static_cast<std::size_t>(rank);
    return view_schedule(spec_->schedule, static_cast<const std::int32_t*>(schedules_[index].data()));
  }

  // --- Nodes and their order ---

  void add_pass(std::int32_t pass) {
    pass_begin_ = num_nodes_;
    raised_.assign(num_ranks() * kNumFlagKinds, kNobody);
    counted_.resize(num_ranks() * kNumCounterKinds);
    if (operation(pass).pass == Pass::kSchedule) ++schedule_epoch_;
    for (std::int32_t g = 0; g < spec_->num_groups(); ++g) add_launch(pass, g);
    for (std::size_t i = pass_begin_; i < num_nodes_; ++i) {
      if (!nodes_[i].is_host) add_waits(nodes_[i]);
    }
  }

  void add_launch(std::int32_t pass, std::int32_t group) {
    Launch& launch = launches_[static_cast<std::size_t>(group)];
    build_plan(pass, group, launch);
    const std::int32_t last_end = launch.end;
    launch.begin = add_node(pass, group);
    node(launch.begin).is_host = true;
    if (pass > 0) node(launch.begin).after.push_back(last_end);
    std::vector<std::int32_t> tasks;
    add_tasks(pass, group, launch.plan.queues().math_list.queue(), tasks);
    add_tasks(pass, group, launch.plan.queues().copy_list.queue(), tasks);
    launch.end = add_node(pass, group);
    node(launch.end).is_host = true;
    node(launch.end).after = tasks;
    node(launch.end).after.push_back(launch.begin);
  }

  void build_plan(std::int32_t pass, std::int32_t group, Launch& launch) {
    const Operation& what = operation(pass);
    const std::int32_t first_rank = spec_->group_begin[static_cast<std::size_t>(group)];
    const std::int32_t count = spec_->group_begin[static_cast<std::size_t>(group) + 1] - first_rank;
    std::vector<ConstSchedule> schedules;
    for (std::int32_t r = 0; r < count; ++r) schedules.push_back(schedule_of(what.step, first_rank + r));
    if (what.pass == Pass::kSchedule) {
      launch.plan.build_schedule_pass(first_rank, count);
    } else {
      build_launch(*spec_, what, schedules, *mutant_, launch.plan);
    }
    launch.contexts.clear();
    for (std::int32_t r = 0; r < count; ++r) {
      launch.contexts.push_back({spec_, &memory_, &launch.plan.shape(), &launch.plan.rank(r),
                                 schedules[static_cast<std::size_t>(r)], pass, what.layer,
                                 mutant_->single_ids_buffer ? 0 : schedule_epoch_ % 2});
      reset_counters(launch.plan, r);
    }
  }

  void reset_counters(const LaunchPlan& plan, std::int32_t local_rank) {
    for (int kind = 0; kind < kNumCounterKinds; ++kind) {
      const RankPass& rank = plan.rank(local_rank);
      auto& counters = counted_[static_cast<std::size_t>(rank.rank * kNumCounterKinds + kind)];
      counters.clear();
      if (plan.shape().pass == Pass::kSchedule) continue;
      counters.resize(static_cast<std::size_t>(num_counters(plan.shape(), rank, static_cast<CounterKind>(kind))));
    }
  }

  std::int32_t add_node(std::int32_t pass, std::int32_t group) {
    if (num_nodes_ == nodes_.size()) nodes_.emplace_back();
    Node& added = nodes_[num_nodes_];
    added.pass = pass;
    added.group = group;
    added.is_host = false;
    added.progress = Progress::kUntouched;
    added.after.clear();
    added.after_begins.clear();
    return static_cast<std::int32_t>(num_nodes_++);
  }

  class Signaller {
   public:
    Signaller(Proof& proof, std::int32_t rank, std::int32_t node) : proof_(proof), rank_(rank), node_(node) {}
    void counter(CounterKind kind, std::int64_t index) {
      proof_.counted(rank_, kind).at(static_cast<std::size_t>(index)).push_back(node_);
    }
    void flags(FlagKind kind) { proof_.raised(rank_, kind) = node_; }

   private:
    Proof& proof_;
    std::int32_t rank_;
    std::int32_t node_;
  };

  void add_tasks(std::int32_t pass, std::int32_t group, const Queue& queue, std::vector<std::int32_t>& tasks) {
    const Launch& launch = launches_[static_cast<std::size_t>(group)];
    std::int64_t cursor = 0;
    for (std::int64_t ticket = 0; ticket < queue.num_tickets; ++ticket) {
      const std::int32_t added = add_node(pass, group);
      node(added).task = find_task(queue, ticket, cursor);
      node(added).after.push_back(launch.begin);
      tasks.push_back(added);
      Signaller signaller(*this, launch.plan.rank(node(added).task.rank()).rank, added);
      visit_signals(node(added).task, signaller);
    }
  }

  void add_waits(Node& waiting) {
    const LaunchPlan& plan = launches_[static_cast<std::size_t>(waiting.group)].plan;
    const RankPass& rank = plan.rank(waiting.task.rank());
    list_waits(plan.shape(), rank, waiting.task, *mutant_, waits_);
    for (const Wait& wait : waits_) {
      if (wait.is_flag) {
        const std::size_t writers = num_ranks() - (mutant_->ignores_last_writer ? 1 : 0);
        for (std::size_t w = 0; w < writers; ++w) {
          add_edge(raised(static_cast<std::int32_t>(w), wait.flag), waiting);
        }
      } else {
        add_counter_edges(counted(rank.rank, wait.counter).at(static_cast<std::size_t>(wait.index)), wait, waiting);
      }
    }
  }

  // A counter that need not be complete says nothing about any one task, except where tasks pass one by one.
  void add_counter_edges(const std::vector<std::int32_t>& signallers, const Wait& wait, Node& waiting) {
    const auto count = static_cast<std::size_t>(std::max(0, wait.at_least));
    if (wait.counter != CounterKind::kCarry && count < signallers.size()) return;
    for (std::size_t i = 0; i < std::min(count, signallers.size()); ++i) add_edge(signallers[i], waiting);
  }

  void add_edge(std::int32_t signaller, Node& waiting) {
    if (signaller == kNobody) return;
    const bool is_early = mutant_->signals_at_begin != nullptr && mutant_->signals_at_begin(node(signaller).task);
    (is_early ? waiting.after_begins : waiting.after).push_back(signaller);
  }

  // --- One allowed order ---

  void run_pass() {
    ancestors_.resize(std::max(ancestors_.size(), num_nodes_));
    for (std::size_t i = pass_begin_; i < num_nodes_; ++i) run_node(static_cast<std::int32_t>(i));
  }

  void run_node(std::int32_t index) {
    Node& self = node(index);
    if (self.progress == Progress::kDone) return;
    if (self.progress == Progress::kUnderWay) throw Violation("tasks wait for each other");
    self.progress = Progress::kUnderWay;
    NodeSet& set = ancestors_[static_cast<std::size_t>(index)];
    set.fill(0);
    for (const std::int32_t before : self.after) {
      run_node(before);
      merge(set, before);
      set[static_cast<std::size_t>(before) / 64] |= std::uint64_t{1} << (before % 64);
    }
    for (const std::int32_t before : self.after_begins) {
      run_node(before);
      merge(set, before);
    }
    current_ = index;
    touch(index);
    self.progress = Progress::kDone;
  }

  void merge(NodeSet& set, std::int32_t before) {
    const NodeSet& other = ancestors_[static_cast<std::size_t>(before)];
    const std::size_t words = num_nodes_ / 64 + 1;
    for (std::size_t i = 0; i < std::min(words, set.size()); ++i) set[i] |= other[i];
  }

  void touch(std::int32_t index) {
    const Node& self = node(index);
    Launch& launch = launches_[static_cast<std::size_t>(self.group)];
    accesses_.clear();
    if (self.is_host) {
      if (launch.plan.shape().pass != Pass::kSchedule) list_host(launch, index == launch.begin);
    } else {
      list_accesses(launch.contexts[static_cast<std::size_t>(self.task.rank())], self.task, accesses_);
    }
    accesses_.begin();
    accesses_.end();
    for (const Access& access : accesses_.accesses()) {
      if (access.mode == AccessMode::kCopy) note_read(index, *access.source);
      if (access.mode == AccessMode::kRead) {
        note_read(index, *access.cell);
      } else {
        note_write(index, *access.cell);
      }
    }
  }

  void list_host(const Launch& launch, bool is_begin) {
    for (const PassContext& context : launch.contexts) {
      if (is_begin) {
        allocate_saved(context);
        list_preparation(context, accesses_);
      } else {
        check_outputs(context);
        list_return(context, accesses_);
      }
    }
  }

  void note_read(std::int32_t index, const Cell& cell) {
    History& history = histories_[&cell];
    require_after(index, history.writer, cell);
    history.readers.push_back(index);
  }

  void note_write(std::int32_t index, const Cell& cell) {
    History& history = histories_[&cell];
    require_after(index, history.writer, cell);
    for (const std::int32_t reader : history.readers) require_after(index, reader, cell);
    history.readers.clear();
    history.writer = index;
  }

  void require_after(std::int32_t index, std::int32_t before, const Cell& cell) {
    if (before == kNobody || before == index) return;
    const NodeSet& set = ancestors_[static_cast<std::size_t>(index)];
    if ((set[static_cast<std::size_t>(before) / 64] >> (before % 64) & 1u) != 0) return;
    throw Violation("is not ordered with " + describe_node(before) + ", and both touch " + to_string(cell.tag));
  }

  // --- Places ---

  std::string describe_node(std::int32_t index) {
    if (index == kNobody) return "";
    const Node& self = node(index);
    const std::int32_t first_rank = spec_->group_begin[static_cast<std::size_t>(self.group)];
    std::string text = "pass " + std::to_string(self.pass);
    // Segments of passes before are gone.
    if (self.is_host || static_cast<std::size_t>(index) < pass_begin_) {
      return text + ", launch of rank " + std::to_string(first_rank);
    }
    return text + ", rank " + std::to_string(first_rank + self.task.rank()) + ", " + to_string(self.task.kind()) +
           " (block " + std::to_string(self.task.block) + ", tile " + std::to_string(self.task.tile) + ")";
  }

  std::size_t num_ranks() const { return static_cast<std::size_t>(spec_->schedule.num_ranks); }
  const Operation& operation(std::int32_t pass) const { return spec_->program[static_cast<std::size_t>(pass)]; }
  Node& node(std::int32_t index) { return nodes_[static_cast<std::size_t>(index)]; }
  std::int32_t& raised(std::int32_t rank, FlagKind kind) {
    return raised_[static_cast<std::size_t>(rank * kNumFlagKinds + static_cast<std::int32_t>(kind))];
  }
  std::vector<std::vector<std::int32_t>>& counted(std::int32_t rank, CounterKind kind) {
    return counted_[static_cast<std::size_t>(rank * kNumCounterKinds + static_cast<std::int32_t>(kind))];
  }

  const PlanSpec* spec_ = nullptr;
  const Mutant* mutant_ = nullptr;
  Memory memory_;
  std::vector<std::vector<std::int32_t>> schedules_;  // [steps * R]
  std::vector<Launch> launches_;                      // of the pass at hand
  std::vector<Node> nodes_;
  std::size_t num_nodes_ = 0;
  std::size_t pass_begin_ = 0;
  std::vector<NodeSet> ancestors_;
  std::vector<std::int32_t> raised_;                             // [R * kinds] who raises the flag in this pass
  std::vector<std::vector<std::vector<std::int32_t>>> counted_;  // [R * kinds][index] who counts, in queue order
  std::unordered_map<const Cell*, History> histories_;
  AccessList accesses_;
  std::vector<Wait> waits_;
  std::int32_t schedule_epoch_ = 0;
  std::int32_t current_ = kNobody;
};

OrderingProver::OrderingProver() : proof_(std::make_unique<Proof>()) {}
OrderingProver::~OrderingProver() = default;

Result OrderingProver::run(const PlanSpec& spec, const Mutant* mutant) {
  static const Mutant kNone;
  return proof_->run(spec, mutant != nullptr ? *mutant : kNone);
}

}  // namespace clowder::plan::explore

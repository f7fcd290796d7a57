#include "explorer.h"

#include <algorithm>
#include <vector>

#include "accesses.h"
#include "flag_board.h"
#include "launch_plan.h"
#include "memory_model.h"
#include "plan/dependencies.h"
#include "random.h"

namespace clowder::plan::explore {
namespace {

constexpr std::int32_t kNobody = -1;
constexpr std::int64_t kPreferred = std::int64_t{1} << 32;

enum class Role : std::int32_t { kHost, kMath, kCopy };

enum class State : std::int32_t {
  kIdle,     // takes the next ticket (a host: starts the next pass)
  kTaken,    // waits
  kWorking,  // its accesses are in progress
  kReturn,   // a host whose launch has ended
  kGone,     // no tickets left (a host: no passes left)
};

struct Actor {
  Role role = Role::kHost;
  State state = State::kIdle;
  std::int32_t group = 0;
  std::int64_t cursor = 0;
  Task task;
  std::vector<Wait> waits;
  std::size_t waits_met = 0;
  std::int32_t writers_met = 0;  // of a flag wait
  AccessList accesses;
  std::int32_t next_waiter = kNobody;
  bool is_slow = false;

  void reset(Role new_role, std::int32_t new_group) {
    role = new_role;
    group = new_group;
    state = State::kIdle;
    is_slow = false;
  }
};

struct Counter {
  std::int32_t value = 0;
  std::int32_t first_waiter = kNobody;
};

// The launches of some ranks, one pass after the other.
struct Group {
  std::int32_t first_rank = 0;
  std::int32_t num_ranks = 0;
  std::int32_t host = 0;  // its actor; the agents follow
  std::size_t next_operation = 0;
  std::int32_t schedule_epoch = 0;
  std::int32_t layer_epoch = 0;
  LaunchPlan plan;
  std::vector<PassContext> contexts;
  std::vector<Counter> counters;
  std::vector<std::size_t> counter_begin;  // [ranks * kinds + 1]
  std::int64_t next_math_ticket = 0;
  std::int64_t next_copy_ticket = 0;
  std::int32_t active_agents = 0;

  void reset() {
    next_operation = 0;
    schedule_epoch = 0;
    layer_epoch = 0;
    counters.clear();
  }
};

const char* name_of(CounterKind kind) {
  static constexpr const char* kNames[kNumCounterKinds] = {"pulled", "up",    "down",      "hidden",     "input",
                                                           "weight", "carry", "shared_up", "remote_work"};
  return kNames[static_cast<int>(kind)];
}

}  // namespace

class Explorer::Simulation {
 public:
  Result run(const PlanSpec& spec, const Mutant& mutant) {
    reset(spec, mutant);
    Result result;
    try {
      while (step()) ++result.steps;
      check_finished();
    } catch (const Violation& violation) {
      result.failed = true;
      result.what = describe(spec) + ": " + describe_actor(current_) + " " + violation.what();
    }
    result.tasks = tasks_;
    return result;
  }

 private:
  // --- Set up ---

  void reset(const PlanSpec& spec, const Mutant& mutant) {
    spec_ = &spec;
    mutant_ = &mutant;
    random_ = Random(spec.interleaving.seed);
    memory_.allocate(spec);
    flags_.reset(spec.schedule.num_ranks);
    flag_waiters_.assign(static_cast<std::size_t>(spec.schedule.num_ranks) * kNumFlagKinds, kNobody);
    tasks_ = 0;
    lowest_priority_ = 0;
    current_ = kNobody;
    reset_schedules();
    reset_actors();
  }

  // What a schedule's builder leaves unwritten must not be read.
  void reset_schedules() {
    const auto words = static_cast<std::size_t>(spec_->schedule.words());
    schedules_.resize(std::max(schedules_.size(), spec_->steps.size() * num_ranks()));
    for (std::size_t i = 0; i < spec_->steps.size() * num_ranks(); ++i) schedules_[i].assign(words, INT32_MIN / 2);
  }

  void reset_actors() {
    const std::int32_t per_group = 1 + 2 * spec_->blocks;
    num_actors_ = spec_->num_groups() * per_group;
    if (actors_.size() < static_cast<std::size_t>(num_actors_)) actors_.resize(static_cast<std::size_t>(num_actors_));
    if (groups_.size() < static_cast<std::size_t>(spec_->num_groups())) {
      groups_.resize(static_cast<std::size_t>(spec_->num_groups()));
    }
    priorities_.assign(static_cast<std::size_t>(num_actors_), 0);
    ready_.clear();
    for (std::int32_t g = 0; g < spec_->num_groups(); ++g) {
      Group& group = groups_[static_cast<std::size_t>(g)];
      group.reset();
      group.first_rank = spec_->group_begin[static_cast<std::size_t>(g)];
      group.num_ranks = spec_->group_begin[static_cast<std::size_t>(g) + 1] - group.first_rank;
      group.host = g * per_group;
      for (std::int32_t i = 0; i < per_group; ++i) {
        const Role role = i == 0 ? Role::kHost : (i % 2 == 1 ? Role::kMath : Role::kCopy);
        actor(group.host + i).reset(role, g);
        draw_priority(group.host + i);
      }
      ready_.push_back(group.host);
    }
  }

  // --- Who runs next ---

  void draw_priority(std::int32_t index) {
    const Actor& who = actor(index);
    std::int64_t priority = random_.below(1u << 31);
    bool is_preferred = false;
    switch (spec_->interleaving.priorities) {
      case Priorities::kRandom:
        break;
      case Priorities::kMathFirst:
        is_preferred = who.role != Role::kCopy;
        break;
      case Priorities::kCopyFirst:
        is_preferred = who.role != Role::kMath;
        break;
      case Priorities::kOldest:
        priority = num_actors_ - index;
        break;
      case Priorities::kNewest:
        priority = index;
        break;
      case Priorities::kStallGroup:
        is_preferred = who.group != spec_->interleaving.stalled_group;
        break;
    }
    priorities_[static_cast<std::size_t>(index)] = priority + (is_preferred ? kPreferred : 0);
  }

  void lower_priority(std::int32_t index) { priorities_[static_cast<std::size_t>(index)] = --lowest_priority_; }

  // A position in ready_.
  std::size_t choose() {
    const auto count = static_cast<std::uint32_t>(ready_.size());
    if (random_.chance(spec_->interleaving.random)) return random_.below(count);
    std::size_t best = 0;
    for (std::size_t i = 1; i < ready_.size(); ++i) {
      if (priority_at(i) > priority_at(best)) best = i;
    }
    return best;
  }
  std::int64_t priority_at(std::size_t position) const {
    return priorities_[static_cast<std::size_t>(ready_[position])];
  }

  // Runs one step of somebody; false when nobody can.
  bool step() {
    if (flags_.has_pending() && (ready_.empty() || random_.chance(spec_->interleaving.flag_pace))) {
      arrive(flags_.deliver_any(random_));
      return true;
    }
    if (ready_.empty()) return false;
    const std::size_t position = choose();
    current_ = ready_[position];
    if (!run_actor(current_)) {
      ready_[position] = ready_.back();  // an actor that this step has woken stands behind it
      ready_.pop_back();
    }
    if (random_.chance(spec_->interleaving.change)) lower_priority(current_);
    return true;
  }

  // True while the actor can go on.
  bool run_actor(std::int32_t index) {
    Actor& who = actor(index);
    if (who.role == Role::kHost) return run_host(who);
    switch (who.state) {
      case State::kIdle:
        return take_ticket(index, who);
      case State::kTaken:
        return begin_task(index, who);
      case State::kWorking:
        end_task(index, who);
        return true;
      case State::kReturn:
      case State::kGone:
        break;
    }
    return false;
  }

  // --- Hosts ---

  bool run_host(Actor& host) {
    Group& group = groups_[static_cast<std::size_t>(host.group)];
    if (host.state == State::kReturn) {
      return_from_pass(group);
      ++group.next_operation;
      host.state = State::kIdle;
    }
    if (group.next_operation == spec_->program.size()) {
      host.state = State::kGone;
      return false;
    }
    start_pass(group);
    return false;
  }

  const Operation& operation_of(const Group& group) const { return spec_->program[group.next_operation]; }

  void start_pass(Group& group) {
    const Operation& operation = operation_of(group);
    if (operation.pass == Pass::kSchedule) {
      ++group.schedule_epoch;
      group.plan.build_schedule_pass(group.first_rank, group.num_ranks);
    } else {
      ++group.layer_epoch;
      build_layer_pass(group, operation);
    }
    make_contexts(group, operation);
    if (operation.pass != Pass::kSchedule) prepare_tensors(group);
    clear_counters(group);
    group.next_math_ticket = 0;
    group.next_copy_ticket = 0;
    group.active_agents = 2 * spec_->blocks;
    for (std::int32_t i = 1; i <= group.active_agents; ++i) {
      Actor& agent = actor(group.host + i);
      agent.state = State::kIdle;
      agent.cursor = 0;
      ready_.push_back(group.host + i);
    }
  }

  void build_layer_pass(Group& group, const Operation& operation) {
    local_schedules_.clear();
    for (std::int32_t r = 0; r < group.num_ranks; ++r) {
      local_schedules_.push_back(schedule_of(operation.step, group.first_rank + r));
    }
    build_launch(*spec_, operation, local_schedules_, *mutant_, group.plan);
  }

  void make_contexts(Group& group, const Operation& operation) {
    group.contexts.assign(static_cast<std::size_t>(group.num_ranks), PassContext{});
    for (std::int32_t r = 0; r < group.num_ranks; ++r) {
      PassContext& context = group.contexts[static_cast<std::size_t>(r)];
      context.spec = spec_;
      context.memory = &memory_;
      context.shape = &group.plan.shape();
      context.rank = &group.plan.rank(r);
      context.schedule = schedule_of(operation.step, group.first_rank + r);
      context.instance = static_cast<std::int32_t>(group.next_operation);
      context.layer = operation.layer;
      context.ids_parity = mutant_->single_ids_buffer ? 0 : group.schedule_epoch % 2;
    }
  }

  // What the caller and the host do before a pass.
  void prepare_tensors(const Group& group) {
    for (const PassContext& context : group.contexts) {
      allocate_saved(context);
      run_at_once(context, list_preparation);
    }
  }

  // A list of accesses that no task competes with.
  void run_at_once(const PassContext& context, void (*list)(const PassContext&, AccessList&)) {
    host_accesses_.clear();
    list(context, host_accesses_);
    host_accesses_.begin();
    host_accesses_.end();
  }

  void return_from_pass(const Group& group) {
    if (operation_of(group).pass == Pass::kSchedule) return;
    for (const PassContext& context : group.contexts) {
      check_outputs(context);
      run_at_once(context, list_return);
    }
  }

  void clear_counters(Group& group) {
    group.counter_begin.clear();
    std::size_t count = 0;
    for (std::int32_t r = 0; r < group.num_ranks; ++r) {
      for (int kind = 0; kind < kNumCounterKinds; ++kind) {
        group.counter_begin.push_back(count);
        if (group.plan.shape().pass == Pass::kSchedule) continue;
        count += static_cast<std::size_t>(
            num_counters(group.plan.shape(), group.plan.rank(r), static_cast<CounterKind>(kind)));
      }
    }
    group.counter_begin.push_back(count);
    if (!mutant_->keeps_counters) group.counters.clear();
    group.counters.resize(count);
  }

  // --- Agents ---

  bool take_ticket(std::int32_t index, Actor& agent) {
    Group& group = groups_[static_cast<std::size_t>(agent.group)];
    const bool is_math = agent.role == Role::kMath;
    const Queue queue = (is_math ? group.plan.queues().math_list : group.plan.queues().copy_list).queue();
    std::int64_t& next = is_math ? group.next_math_ticket : group.next_copy_ticket;
    if (next >= queue.num_tickets) return leave(agent, group);
    agent.task = find_task(queue, next++, agent.cursor);
    agent.state = State::kTaken;
    agent.waits_met = 0;
    agent.writers_met = 0;
    list_waits(group.plan.shape(), group.plan.rank(agent.task.rank()), agent.task, *mutant_, agent.waits);
    if (spec_->interleaving.slow_from_ticket && is_slow_kind(agent.task)) slow_down(index, agent);
    return true;
  }

  bool is_slow_kind(const Task& task) const {
    return (spec_->interleaving.slow_kinds >> static_cast<int>(task.kind()) & 1u) != 0;
  }

  void slow_down(std::int32_t index, Actor& agent) {
    agent.is_slow = true;
    lower_priority(index);
  }

  bool leave(Actor& agent, Group& group) {
    agent.state = State::kGone;
    if (--group.active_agents == 0) {
      actor(group.host).state = State::kReturn;
      ready_.push_back(group.host);
    }
    return false;
  }

  bool begin_task(std::int32_t index, Actor& agent) {
    Group& group = groups_[static_cast<std::size_t>(agent.group)];
    if (!have_waits_ended(index, agent, group)) return false;
    agent.accesses.clear();
    list_accesses(group.contexts[static_cast<std::size_t>(agent.task.rank())], agent.task, agent.accesses);
    agent.accesses.begin();
    if (signals_at_begin(agent.task)) signal(agent, group);
    agent.state = State::kWorking;
    if (is_slow_kind(agent.task) || random_.chance(spec_->interleaving.slow_tasks)) slow_down(index, agent);
    return true;
  }

  void end_task(std::int32_t index, Actor& agent) {
    Group& group = groups_[static_cast<std::size_t>(agent.group)];
    agent.accesses.end();
    if (agent.task.kind() == TaskKind::kBuildSchedule) build_schedule_of(group, agent.task.rank());
    if (!signals_at_begin(agent.task)) signal(agent, group);
    agent.state = State::kIdle;
    ++tasks_;
    if (agent.is_slow) draw_priority(index);
    agent.is_slow = false;
  }

  bool signals_at_begin(const Task& task) const {
    return mutant_->signals_at_begin != nullptr && mutant_->signals_at_begin(task);
  }

  void build_schedule_of(const Group& group, std::int32_t local_rank) {
    const Operation& operation = operation_of(group);
    const Routing& routing = spec_->steps[static_cast<std::size_t>(operation.step)];
    id_pointers_.clear();
    for (const std::vector<std::int32_t>& ids : routing.topk_idx) id_pointers_.push_back(ids.data());
    const std::int32_t rank = group.first_rank + local_rank;
    Schedule schedule = view_schedule(spec_->schedule, schedule_words(operation.step, rank).data());
    build_schedule(rank, ExchangedIds{id_pointers_.data(), routing.tokens.data()}, schedule);
  }

  // --- Waits and signals ---

  // An actor that has to wait stands in the list of what it waits for.
  bool have_waits_ended(std::int32_t index, Actor& agent, Group& group) {
    for (; agent.waits_met < agent.waits.size(); ++agent.waits_met) {
      const Wait& wait = agent.waits[agent.waits_met];
      if (wait.is_flag ? !are_flags_raised(index, agent, group, wait.flag) : !has_counted(index, agent, group, wait)) {
        return false;
      }
    }
    return true;
  }

  bool has_counted(std::int32_t index, Actor& agent, Group& group, const Wait& wait) {
    Counter& counter = counter_of(group, agent.task.rank(), wait.counter, wait.index);
    if (counter.value >= wait.at_least) return true;
    agent.next_waiter = counter.first_waiter;
    counter.first_waiter = index;
    return false;
  }

  bool are_flags_raised(std::int32_t index, Actor& agent, const Group& group, FlagKind kind) {
    const std::int32_t rank = group.first_rank + agent.task.rank();
    const std::int32_t epoch = epoch_of(group, kind) - (mutant_->accepts_old_epoch ? 1 : 0);
    const std::int32_t writers = spec_->schedule.num_ranks - (mutant_->ignores_last_writer ? 1 : 0);
    while (agent.writers_met < writers) {
      if (flags_.value(rank, kind, agent.writers_met) < epoch) {
        std::int32_t& first = flag_waiters(rank, kind);
        agent.next_waiter = first;
        first = index;
        return false;
      }
      ++agent.writers_met;
    }
    agent.writers_met = 0;
    return true;
  }

  static std::int32_t epoch_of(const Group& group, FlagKind kind) {
    return kind == FlagKind::kIdsReady ? group.schedule_epoch : group.layer_epoch;
  }

  class Signaller {
   public:
    Signaller(Simulation& simulation, Group& group, std::int32_t rank)
        : simulation_(simulation), group_(group), rank_(rank) {}
    void counter(CounterKind kind, std::int64_t index) { simulation_.count(group_, rank_, kind, index); }
    void flags(FlagKind kind) { simulation_.raise(group_, rank_, kind); }

   private:
    Simulation& simulation_;
    Group& group_;
    std::int32_t rank_;
  };

  void signal(const Actor& agent, Group& group) {
    Signaller signaller(*this, group, agent.task.rank());
    visit_signals(agent.task, signaller);
  }

  void count(Group& group, std::int32_t local_rank, CounterKind kind, std::int64_t index) {
    Counter& counter = counter_of(group, local_rank, kind, index);
    ++counter.value;
    std::int32_t waiter = counter.first_waiter;
    counter.first_waiter = kNobody;
    for (; waiter != kNobody; waiter = actor(waiter).next_waiter) ready_.push_back(waiter);
  }

  void raise(const Group& group, std::int32_t local_rank, FlagKind kind) {
    const std::int32_t writer = group.first_rank + local_rank;
    for (std::int32_t reader = 0; reader < spec_->schedule.num_ranks; ++reader) {
      if (flags_.is_full(reader, writer)) arrive(flags_.deliver(reader, writer));
      flags_.raise(reader, kind, writer, epoch_of(group, kind));
      if (spec_->interleaving.flags_at_once) arrive(flags_.deliver(reader, writer));
    }
  }

  void arrive(const FlagBoard::Arrival& arrival) {
    std::int32_t waiter = flag_waiters(arrival.reader, arrival.kind);
    std::int32_t still_waiting = kNobody;
    while (waiter != kNobody) {
      Actor& agent = actor(waiter);
      const std::int32_t next = agent.next_waiter;
      if (agent.writers_met == arrival.writer) {
        ready_.push_back(waiter);
      } else {
        agent.next_waiter = still_waiting;
        still_waiting = waiter;
      }
      waiter = next;
    }
    flag_waiters(arrival.reader, arrival.kind) = still_waiting;
  }

  // --- Ends ---

  void check_finished() {
    std::string blocked;
    std::int32_t count = 0;
    for (std::int32_t i = 0; i < num_actors_; ++i) {
      if (actor(i).state != State::kTaken) continue;
      if (++count <= 4) blocked += "; " + describe_actor(i) + " waits for " + describe_wait(actor(i));
    }
    current_ = kNobody;
    for (std::int32_t g = 0; g < spec_->num_groups(); ++g) {
      if (actor(groups_[static_cast<std::size_t>(g)].host).state != State::kGone) {
        throw Violation("deadlock, " + std::to_string(count) + " agents wait" + blocked);
      }
    }
  }

  std::string describe_actor(std::int32_t index) {
    if (index == kNobody) return "";
    const Actor& who = actor(index);
    const Group& group = groups_[static_cast<std::size_t>(who.group)];
    std::string text = "pass " + std::to_string(group.next_operation);
    if (who.role == Role::kHost) return text + ", host of rank " + std::to_string(group.first_rank);
    return text + ", rank " + std::to_string(group.first_rank + who.task.rank()) + ", " + to_string(who.task.kind()) +
           " (block " + std::to_string(who.task.block) + ", tile " + std::to_string(who.task.tile) + ")";
  }

  std::string describe_wait(const Actor& agent) {
    const Wait& wait = agent.waits[agent.waits_met];
    if (wait.is_flag) return std::string(to_string(wait.flag)) + " of rank " + std::to_string(agent.writers_met);
    return std::string(name_of(wait.counter)) + "[" + std::to_string(wait.index) + "] to reach " +
           std::to_string(wait.at_least);
  }

  // --- Places ---

  std::size_t num_ranks() const { return static_cast<std::size_t>(spec_->schedule.num_ranks); }
  Actor& actor(std::int32_t index) { return actors_[static_cast<std::size_t>(index)]; }

  std::vector<std::int32_t>& schedule_words(std::int32_t step, std::int32_t rank) {
    return schedules_[static_cast<std::size_t>(step) * num_ranks() + static_cast<std::size_t>(rank)];
  }
  ConstSchedule schedule_of(std::int32_t step, std::int32_t rank) {
    return view_schedule(spec_->schedule, static_cast<const std::int32_t*>(schedule_words(step, rank).data()));
  }

  Counter& counter_of(Group& group, std::int32_t local_rank, CounterKind kind, std::int64_t index) {
    const auto place = static_cast<std::size_t>(local_rank * kNumCounterKinds + static_cast<std::int32_t>(kind));
    const std::size_t position = group.counter_begin[place] + static_cast<std::size_t>(index);
    if (index < 0 || position >= group.counter_begin[place + 1]) {
      throw Violation("uses a counter that is not there: " + std::string(name_of(kind)) + "[" + std::to_string(index) +
                      "]");
    }
    return group.counters[position];
  }
  std::int32_t& flag_waiters(std::int32_t rank, FlagKind kind) {
    return flag_waiters_[static_cast<std::size_t>(rank * kNumFlagKinds + static_cast<std::int32_t>(kind))];
  }

  const PlanSpec* spec_ = nullptr;
  const Mutant* mutant_ = nullptr;
  Random random_{0};
  Memory memory_;
  FlagBoard flags_;
  std::vector<std::int32_t> flag_waiters_;  // [R * kinds] the first waiting actor
  std::vector<std::vector<std::int32_t>> schedules_;
  std::vector<Actor> actors_;
  std::int32_t num_actors_ = 0;
  std::vector<Group> groups_;
  std::vector<std::int64_t> priorities_;
  std::int64_t lowest_priority_ = 0;
  std::vector<std::int32_t> ready_;  // actors that can take a step
  std::int32_t current_ = kNobody;
  std::int64_t tasks_ = 0;
  AccessList host_accesses_;
  std::vector<ConstSchedule> local_schedules_;
  std::vector<const std::int32_t*> id_pointers_;
};

Explorer::Explorer() : simulation_(std::make_unique<Simulation>()) {}
Explorer::~Explorer() = default;

Result Explorer::run(const PlanSpec& spec, const Mutant* mutant) {
  static const Mutant kNone;
  return simulation_->run(spec, mutant != nullptr ? *mutant : kNone);
}

}  // namespace clowder::plan::explore

#include <mutex>
#include <new>

#include "clowder/layer.h"
#include "engine/arguments.h"
#include "engine/engine.h"
#include "model/shape.h"

namespace clowder {

namespace {

// A machine without enough memory is an error like others. What was asked for has not begun.
template <class Call>
auto or_too_little_memory(const Call& call) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::kUnsupported, "memory: this machine has too little for a layer of this shape");
  }
}

}  // namespace

class Workspace::Implementation {
 public:
  explicit Implementation(std::unique_ptr<Engine> engine) : engine_(std::move(engine)) {}

  const Engine& engine() const { return *engine_; }

  void build_schedule(const std::vector<ExpertIds>& ids, const std::vector<std::int32_t*>& schedules, Stream stream) {
    const std::lock_guard lock(one_call_at_a_time_);
    engine_->check();
    check_ids(engine_->shape(), engine_->group(), ids, schedules);
    or_too_little_memory([&] { engine_->build_schedule(ids, schedules, stream); });
  }

  void forward(const std::vector<ForwardInputs>& ranks, Stream stream) {
    const std::lock_guard lock(one_call_at_a_time_);
    engine_->check();
    check_forward(engine_->shape(), engine_->group(), ranks);
    or_too_little_memory([&] { engine_->forward(ranks, stream); });
  }

  void backward(const std::vector<BackwardInputs>& ranks, GradientMode mode, Stream stream) {
    const std::lock_guard lock(one_call_at_a_time_);
    engine_->check();
    check_backward(engine_->shape(), engine_->group(), ranks, mode);
    or_too_little_memory([&] { engine_->backward(ranks, mode, stream); });
  }

 private:
  std::unique_ptr<Engine> engine_;
  std::mutex one_call_at_a_time_;
};

namespace {

std::unique_ptr<Engine> make_engine(const LayerShape& shape, std::shared_ptr<Group> group,
                                    const WorkspaceOptions& options) {
  const EngineType& type = engine_type(options.engine);
  check_group(group.get());
  validate(shape, group->size());
  return or_too_little_memory([&] { return type.make(shape, std::move(group), options); });
}

}  // namespace

Workspace::Workspace(const LayerShape& shape, std::shared_ptr<Group> group, const WorkspaceOptions& options)
    : implementation_(std::make_unique<Implementation>(make_engine(shape, std::move(group), options))) {}
Workspace::~Workspace() = default;

const LayerShape& Workspace::shape() const { return implementation_->engine().shape(); }
const Group& Workspace::group() const { return implementation_->engine().group(); }
std::int64_t Workspace::ring_rows() const { return implementation_->engine().ring_rows(); }
std::int64_t Workspace::saved_rows() const { return implementation_->engine().saved_rows(); }
std::int64_t Workspace::schedule_words() const { return implementation_->engine().schedule_words(); }
bool Workspace::is_dead() const { return implementation_->engine().is_dead(); }
void Workspace::check() const { implementation_->engine().check(); }
const std::vector<WaitReport>& Workspace::wait_reports() const { return implementation_->engine().wait_reports(); }

std::size_t Workspace::symmetric_bytes(const LayerShape& shape, int num_ranks, EngineKind engine) {
  const EngineType& type = engine_type(engine);
  validate(shape, num_ranks);
  return type.symmetric_bytes(shape, num_ranks);
}

std::int64_t Workspace::min_ring_rows(EngineKind engine) { return engine_type(engine).min_ring_rows(); }

void Workspace::build_schedule(const std::vector<ExpertIds>& ids, const std::vector<std::int32_t*>& schedules,
                               Stream stream) {
  implementation_->build_schedule(ids, schedules, stream);
}
void Workspace::forward(const std::vector<ForwardInputs>& ranks, Stream stream) {
  implementation_->forward(ranks, stream);
}
void Workspace::backward(const std::vector<BackwardInputs>& ranks, GradientMode mode, Stream stream) {
  implementation_->backward(ranks, mode, stream);
}

}  // namespace clowder

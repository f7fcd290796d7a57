// The interface between the public Workspace and what carries out its passes.
//
// Workspace makes one call at a time on an engine, on a living one only, and with arguments that have passed the checks
// of arguments.h. An engine checks what those leave: whatever takes reading memory, or depends on its own limits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "clowder/layer.h"

namespace clowder {

class Engine {
 public:
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const LayerShape& shape() const { return shape_; }
  const Group& group() const { return *group_; }

  virtual std::int64_t ring_rows() const = 0;
  virtual std::int64_t saved_rows() const = 0;
  virtual std::int64_t schedule_words() const = 0;

  // As those of Workspace. They throw what went wrong as far as it is known when they return.
  virtual void build_schedule(const std::vector<ExpertIds>& ids, const std::vector<std::int32_t*>& schedules,
                              Stream stream) = 0;
  virtual void forward(const std::vector<ForwardInputs>& ranks, Stream stream) = 0;
  virtual void backward(const std::vector<BackwardInputs>& ranks, GradientMode mode, Stream stream) = 0;

  // From any thread, also while a pass runs. An asynchronous engine looks at its device's status first.
  virtual bool is_dead() const = 0;
  virtual void check() const = 0;
  virtual const std::vector<WaitReport>& wait_reports() const = 0;

 protected:
  Engine(const LayerShape& shape, std::shared_ptr<Group> group) : shape_(shape), group_(std::move(group)) {}
  // For its collective calls.
  Group& own_group() { return *group_; }

 private:
  LayerShape shape_;
  std::shared_ptr<Group> group_;
};

// What is known of an engine before there is one. `shape` is valid for the group, which is not null.
struct EngineType {
  std::unique_ptr<Engine> (*make)(const LayerShape& shape, std::shared_ptr<Group> group,
                                  const WorkspaceOptions& options);
  std::size_t (*symmetric_bytes)(const LayerShape& shape, int num_ranks);
  std::int64_t (*min_ring_rows)();
  bool (*is_usable)();  // on this machine
};

// Throws Error(kUnsupported) where this build has no such engine, Error(kArgument) where there is none of that name.
const EngineType& engine_type(EngineKind kind);

bool is_built(EngineKind kind);
// In the build, and on this machine.
bool is_usable(EngineKind kind);

}  // namespace clowder

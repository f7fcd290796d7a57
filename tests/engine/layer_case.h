// Layers as tests want them: a problem, a workspace, and one step after the other on it.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "check/engine_step.h"
#include "check/problem.h"
#include "check/run.h"
#include "clowder/layer.h"

namespace clowder::test {

// CLOWDER_TEST_SCALE=small is for builds that are slow, such as those with sanitizers.
bool is_small_scale();
template <class T>
T scaled(T usual, T small) {
  return is_small_scale() ? small : usual;
}

using Digests = std::map<std::string, std::string>;

// Runs one step on poisoned buffers and expects every tensor within its bounds.
Digests expect_ok(const check::ProblemSpec& spec, check::RunOptions options = {});

// The bits that may not depend on the number of ranks.
Digests without_shared_gradients(Digests digests);

// A problem with a workspace on which steps follow each other. `max_tokens` of 0 fits the workspace to the problem.
class LayerCase {
 public:
  LayerCase(const check::ProblemSpec& spec, const WorkspaceOptions& options, std::int64_t max_tokens = 0);

  // Schedule, forward and backward; returns the digest of every bit that was written.
  std::string step();
  // The same on another problem of the same layer.
  std::string step(const check::Problem& problem);

  const check::Problem& problem() const { return problem_; }
  Workspace& workspace() { return *workspace_; }
  // Tensors of the last step.
  const check::LayerTensors& tensors() const { return tensors_; }

 private:
  check::Problem problem_;
  WorkspaceOptions options_;
  std::unique_ptr<Workspace> workspace_;
  check::LayerTensors tensors_;
};

// Expects a step's tensors within their bounds.
void expect_close(const check::Problem& problem, const check::LayerTensors& tensors);

// Splits a global batch as the counts say, rank by rank.
check::ProblemSpec on_ranks(check::ProblemSpec spec, const std::vector<std::int64_t>& tokens_per_rank);
check::ProblemSpec on_ranks(const check::ProblemSpec& spec, int ranks);

}  // namespace clowder::test

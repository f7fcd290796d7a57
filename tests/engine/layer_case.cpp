#include "engine/layer_case.h"

#include <cstdlib>
#include <string_view>

#include "check/report.h"

namespace clowder::test {
namespace {

constexpr int kThreads = 2;

void expect_ok(const check::TensorReport& tensor) {
  EXPECT_TRUE(tensor.ok()) << tensor.name << ": rel " << tensor.errors.rel << " of " << tensor.bounds.rel
                           << ", column block " << tensor.errors.rel_worst_column_block << " of "
                           << tensor.bounds.column_block << ", row " << tensor.errors.rel_worst_row << " of "
                           << tensor.bounds.row << ", expert " << tensor.errors.rel_worst_expert << " of "
                           << tensor.bounds.expert;
}

}  // namespace

bool is_small_scale() {
  const char* scale = std::getenv("CLOWDER_TEST_SCALE");
  return scale != nullptr && std::string_view(scale) == "small";
}

Digests expect_ok(const check::ProblemSpec& spec, check::RunOptions options) {
  options.workspace.poison = true;
  options.threads = kThreads;
  const check::Report report = check::run_check(spec, options);
  Digests digests;
  for (const check::TensorReport& tensor : report.tensors) {
    expect_ok(tensor);
    digests[tensor.name] = tensor.digest;
  }
  EXPECT_TRUE(report.repeats_identical);
  EXPECT_EQ(report.skipped_ids, report.expected_skipped_ids);
  return digests;
}

Digests without_shared_gradients(Digests digests) {
  digests.erase("dshared_w13");
  digests.erase("dshared_w2");
  return digests;
}

LayerCase::LayerCase(const check::ProblemSpec& spec, const WorkspaceOptions& options, std::int64_t max_tokens)
    : problem_(check::make_problem(spec, kThreads)), options_(options) {
  LayerShape shape = problem_.shape;
  if (max_tokens > 0) shape.max_tokens = max_tokens;
  workspace_ = std::make_unique<Workspace>(shape, make_virtual_group(spec.num_ranks()), options);
}

std::string LayerCase::step() { return step(problem_); }

std::string LayerCase::step(const check::Problem& problem) {
  check::EngineStep step(problem, *workspace_, options_.keep_x);
  step.reset();
  step.run(*workspace_);
  tensors_ = step.collect();
  return step.digest_of_everything();
}

void expect_close(const check::Problem& problem, const check::LayerTensors& tensors) {
  ReferenceResults reference = check::compute_reference(problem, kThreads);
  for (const check::TensorReport& tensor : check::judge(problem, tensors, reference)) expect_ok(tensor);
}

check::ProblemSpec on_ranks(check::ProblemSpec spec, const std::vector<std::int64_t>& tokens_per_rank) {
  spec.tokens_per_rank = tokens_per_rank;
  return spec;
}

check::ProblemSpec on_ranks(const check::ProblemSpec& spec, int ranks) {
  return on_ranks(spec, check::split_tokens(spec.tokens(), ranks));
}

}  // namespace clowder::test

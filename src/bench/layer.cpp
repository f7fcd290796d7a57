#include "bench/layer.h"

#include <chrono>
#include <string>

#include "check/engine_step.h"

namespace clowder::bench {
namespace {

class EngineLayer : public TimedLayer {
 public:
  EngineLayer(const check::ProblemSpec& spec, const check::RunOptions& options)
      : problem_(check::make_problem(spec, options.threads)),
        workspace_(problem_.shape, make_virtual_group(spec.num_ranks()),
                   check::make_workspace_options(problem_, options, 0)),
        step_(problem_, workspace_, options.workspace.keep_x, options.workspace.engine),
        arguments_(step_.arguments()),
        keep_x_(options.workspace.keep_x) {
    step_.reset();
    step_.upload();
    run(TimedPass::kForward);
  }

  double run(TimedPass pass) override {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point start = Clock::now();
    if (pass != TimedPass::kBackward) workspace_.build_schedule(arguments_.ids, arguments_.schedules);
    if (pass == TimedPass::kForward || pass == TimedPass::kForwardBackward) workspace_.forward(arguments_.forward);
    if (pass == TimedPass::kBackward || pass == TimedPass::kForwardBackward) {
      workspace_.backward(arguments_.backward, problem_.spec.gradient_mode);
    }
    step_.synchronise();
    workspace_.check();
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  }

  std::int64_t saved_bytes() const override {
    const check::ProblemSpec& spec = problem_.spec;
    const std::int64_t row_elements = 2 * spec.intermediate + (keep_x_ ? spec.hidden : 0);
    const std::int64_t of_rank = workspace_.saved_rows() * row_elements * 2 + workspace_.schedule_words() * 4;
    return spec.num_ranks() * of_rank + spec.tokens() * 2 * spec.shared_intermediate * 2;
  }

 private:
  check::Problem problem_;
  Workspace workspace_;
  check::EngineStep step_;
  check::StepArguments arguments_;
  bool keep_x_;
};

}  // namespace

std::unique_ptr<TimedLayer> make_layer(const check::ProblemSpec& spec, const check::RunOptions& options) {
  return std::make_unique<EngineLayer>(spec, options);
}

}  // namespace clowder::bench

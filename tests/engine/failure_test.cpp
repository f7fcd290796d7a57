// Ranks that never arrive, arguments that cannot be used, and what is left of a workspace afterwards.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <thread>

#include "engine/layer_case.h"
#include "group/aligned_memory.h"

namespace clowder::test {
namespace {

using check::LostRank;
using check::Phase;
using check::ProblemSpec;

ProblemSpec small_layer(std::vector<std::int64_t> tokens_per_rank) {
  ProblemSpec spec;
  spec.tokens_per_rank = std::move(tokens_per_rank);
  spec.hidden = 32;
  spec.intermediate = 32;
  spec.num_experts = 2 * spec.num_ranks();
  return spec;
}

// Case 12: all others get an error within the limit that names the lost rank, the flag and the phase.
TEST(Failure, Case12ALostRankIsReportedByAllOthers) {
  struct Expected {
    Phase phase;
    const char* pass;
    const char* flag;
  };
  const std::int32_t block_counts[] = {1, 2, 8};
  std::size_t next = 0;
  for (const Expected& expected :
       {Expected{Phase::kSchedule, "schedule", "ids_ready"}, Expected{Phase::kForward, "forward", "inputs_ready"},
        Expected{Phase::kBackward, "backward", "inputs_ready"}}) {
    for (const int lost : {0, 2}) {
      check::RunOptions options;
      options.workspace.timeout_s = 0.3;
      options.workspace.blocks = block_counts[next++ % 3];
      const auto start = std::chrono::steady_clock::now();
      const auto outcomes =
          check::run_with_lost_rank(small_layer({9, 0, 12, 5}), options, LostRank{lost, expected.phase});
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
      ASSERT_EQ(outcomes.size(), 3u);
      for (const check::RankOutcome& outcome : outcomes) {
        EXPECT_NE(outcome.rank, lost);
        EXPECT_TRUE(outcome.timed_out) << outcome.error;
        const std::string begin = "rank " + std::to_string(outcome.rank) + " waited for rank " + std::to_string(lost);
        EXPECT_EQ(outcome.error.rfind(begin, 0), 0u) << outcome.error;
        EXPECT_NE(outcome.error.find(expected.pass), std::string::npos) << outcome.error;
        EXPECT_NE(outcome.error.find(expected.flag), std::string::npos) << outcome.error;
      }
    }
  }
}

TEST(Failure, ADeadWorkspaceSaysSo) {
  ProblemSpec spec = small_layer({4, 4});
  const check::Problem problem = check::make_problem(spec, 1);
  WorkspaceOptions options;
  options.timeout_s = 0.2;
  const auto groups = make_threaded_groups(2, 10.0);
  std::unique_ptr<Workspace> other;
  std::jthread peer([&] { other = std::make_unique<Workspace>(problem.shape, groups[1], options); });
  Workspace workspace(problem.shape, groups[0], options);
  peer.join();
  check::EngineStep step(problem, workspace, false);
  EXPECT_FALSE(workspace.is_dead());
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      workspace.build_schedule({step.ids(0)}, {step.schedule(0)});
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kTimeout);
      EXPECT_NE(std::string(error.what()).find("rank 0 waited for rank 1 (ids_ready) in schedule"), std::string::npos);
      EXPECT_EQ(std::string(error.what()).find("dead") != std::string::npos, attempt == 1);
    }
    EXPECT_TRUE(workspace.is_dead());
    ASSERT_EQ(workspace.wait_reports().size(), 1u);
    EXPECT_EQ(workspace.wait_reports()[0].waited_for, 1);
  }
}

TEST(Failure, RanksOfTheirOwnThreadsGiveTheSameBits) {
  ProblemSpec spec = small_layer({19, 0, 33});
  LayerCase layer(spec, {});
  layer.step();
  const check::Problem& problem = layer.problem();
  const auto groups = make_threaded_groups(3, 10.0);
  std::unique_ptr<check::EngineStep> step;
  std::vector<std::unique_ptr<Workspace>> workspaces(3);
  const auto on_every_rank = [](const std::function<void(int)>& body) {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < 3; ++rank) threads.emplace_back(body, rank);
  };
  on_every_rank([&](int r) { workspaces[r] = std::make_unique<Workspace>(problem.shape, groups[r]); });
  step = std::make_unique<check::EngineStep>(problem, *workspaces[0], false);
  for (int round = 0; round < scaled(20, 5); ++round) {
    step->reset();
    on_every_rank([&](int r) {
      workspaces[r]->build_schedule({step->ids(r)}, {step->schedule(r)});
      workspaces[r]->forward({step->forward_inputs(r)});
      workspaces[r]->backward({step->backward_inputs(r)}, problem.spec.gradient_mode);
    });
    const check::LayerTensors tensors = step->collect();
    EXPECT_EQ(tensors.out, layer.tensors().out);
    EXPECT_EQ(tensors.dx, layer.tensors().dx);
    EXPECT_EQ(tensors.dtopk_weights, layer.tensors().dtopk_weights);
    EXPECT_EQ(tensors.dw13, layer.tensors().dw13);
    EXPECT_EQ(tensors.dw2, layer.tensors().dw2);
  }
}

// A rank that holds no tokens has no use for dx and dw, but its experts have to send theirs.
TEST(Failure, ARankWithoutTokensMayPassNullGradients) {
  ProblemSpec spec = small_layer({21, 0});
  LayerCase layer(spec, {});
  layer.step();
  const check::Problem& problem = layer.problem();
  const auto groups = make_threaded_groups(2, 10.0);
  std::vector<std::unique_ptr<Workspace>> workspaces(2);
  const auto on_both = [](const std::function<void(int)>& body) {
    std::jthread other(body, 1);
    body(0);
  };
  on_both([&](int r) { workspaces[r] = std::make_unique<Workspace>(problem.shape, groups[r]); });
  check::EngineStep step(problem, *workspaces[0], false);
  step.reset();
  on_both([&](int r) {
    workspaces[r]->build_schedule({step.ids(r)}, {step.schedule(r)});
    workspaces[r]->forward({step.forward_inputs(r)});
    BackwardInputs inputs = step.backward_inputs(r);
    if (r == 1) inputs.dx = nullptr;
    if (r == 1) inputs.dtopk_weights = nullptr;
    workspaces[r]->backward({inputs}, problem.spec.gradient_mode);
  });
  EXPECT_EQ(step.collect().dx, layer.tensors().dx);
  EXPECT_EQ(step.collect().dtopk_weights, layer.tensors().dtopk_weights);
}

// Case 11 on memory of the caller's: full of ones before it is zeroed; every buffer but the flags is full of NaN again.
TEST(CallerOwned, Case11MemoryFullOfOnesBeforeCreation) {
  ProblemSpec spec = small_layer({12, 9});
  LayerCase layer(spec, {});
  layer.step();
  const check::Problem& problem = layer.problem();
  const std::size_t bytes = Workspace::symmetric_bytes(problem.shape, 2);
  const AlignedMemory memory[] = {allocate_zeroed(bytes), allocate_zeroed(bytes)};
  for (const AlignedMemory& part : memory) {
    std::memset(part.get(), 0xff, bytes);
    std::memset(part.get(), 0, bytes);
  }
  WorkspaceOptions options;
  options.poison = true;
  options.timeout_s = 10.0;
  std::vector<std::unique_ptr<Workspace>> workspaces;
  for (int r = 0; r < 2; ++r) {
    const auto group = make_caller_owned_group(r, {memory[0].get(), memory[1].get()}, bytes);
    workspaces.push_back(std::make_unique<Workspace>(problem.shape, group, options));
  }
  check::EngineStep step(problem, *workspaces[0], false);
  for (int launches = 0; launches < scaled(102, 12); launches += 3) {
    step.reset();
    const auto run = [&](int r) {
      workspaces[r]->build_schedule({step.ids(r)}, {step.schedule(r)});
      workspaces[r]->forward({step.forward_inputs(r)});
      workspaces[r]->backward({step.backward_inputs(r)}, problem.spec.gradient_mode);
    };
    {
      std::jthread other(run, 1);
      run(0);
    }
    ASSERT_EQ(step.collect().out, layer.tensors().out);
    ASSERT_EQ(step.collect().dx, layer.tensors().dx);
    ASSERT_EQ(step.collect().dw13, layer.tensors().dw13);
  }
}

void expect_refused(const char* name, const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << name << " was not refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kArgument);
    EXPECT_EQ(std::string(error.what()).rfind(name, 0), 0u) << error.what();
  }
}

TEST(Arguments, OptionsOfAWorkspace) {
  const LayerShape shape = check::make_problem(small_layer({4}), 1).shape;
  const auto refuse = [&](const char* name, auto change) {
    WorkspaceOptions options;
    change(options);
    expect_refused(name, [&] { Workspace workspace(shape, make_virtual_group(1), options); });
  };
  refuse("ring_rows: 95, must be at least 96", [](WorkspaceOptions& o) { o.ring_rows = 95; });
  refuse("saved_rows", [](WorkspaceOptions& o) { o.saved_rows = -2; });
  refuse("chunk_rows", [](WorkspaceOptions& o) { o.chunk_rows = 0; });
  refuse("blocks", [](WorkspaceOptions& o) { o.blocks = 0; });
  refuse("blocks", [](WorkspaceOptions& o) { o.blocks = 100000; });
  for (const double bad : {0.0, -1.0, std::numeric_limits<double>::infinity(), std::nan("")}) {
    refuse("timeout_s", [&](WorkspaceOptions& o) { o.timeout_s = bad; });
  }
  for (const std::int64_t huge : {std::int64_t{1} << 36, std::int64_t{1} << 62}) {
    WorkspaceOptions options;
    options.ring_rows = options.chunk_rows = options.saved_rows = huge;
    Workspace workspace(shape, make_virtual_group(1), options);
    EXPECT_LE(workspace.ring_rows(), 200);
    EXPECT_EQ(workspace.saved_rows(), 8);  // every slot there is
  }
  expect_refused("group", [&] { Workspace workspace(shape, nullptr); });
  expect_refused("num_experts", [&] { Workspace workspace(shape, make_virtual_group(3)); });
}

TEST(Arguments, TensorsOfAPass) {
  ProblemSpec spec = small_layer({5, 4});
  spec.shared_intermediate = 32;
  LayerCase layer(spec, {});
  Workspace& workspace = layer.workspace();
  check::EngineStep step(layer.problem(), workspace, false);
  step.reset();
  workspace.build_schedule({step.ids(0), step.ids(1)}, {step.schedule(0), step.schedule(1)});

  const auto forward = [&](const char* name, auto change) {
    std::vector<ForwardInputs> ranks = {step.forward_inputs(0), step.forward_inputs(1)};
    change(ranks[1]);
    expect_refused(name, [&] { workspace.forward(ranks); });
  };
  forward("schedule", [](ForwardInputs& in) { in.schedule = nullptr; });
  forward("schedule", [&](ForwardInputs& in) { in.schedule = step.schedule(0); });
  const std::vector<std::int32_t> zeros(static_cast<std::size_t>(workspace.schedule_words()));
  forward("schedule", [&](ForwardInputs& in) { in.schedule = zeros.data(); });
  forward("x", [](ForwardInputs& in) { in.x = nullptr; });
  forward("topk_weights", [](ForwardInputs& in) { in.topk_weights = nullptr; });
  forward("out", [](ForwardInputs& in) { in.out = nullptr; });
  forward("experts", [](ForwardInputs& in) { in.experts.pop_back(); });
  forward("experts.w3", [](ForwardInputs& in) { in.experts[1].w3 = nullptr; });
  forward("shared.w2", [](ForwardInputs& in) { in.shared.w2 = nullptr; });
  forward("saved.gate_up", [](ForwardInputs& in) { in.saved.gate_up = nullptr; });
  expect_refused("ranks", [&] { workspace.forward({step.forward_inputs(0)}); });
  workspace.forward({step.forward_inputs(0), step.forward_inputs(1)});

  const auto backward = [&](const char* name, auto change) {
    std::vector<BackwardInputs> ranks = {step.backward_inputs(0), step.backward_inputs(1)};
    change(ranks[1]);
    expect_refused(name, [&] { workspace.backward(ranks, GradientMode::kWriteBf16); });
  };
  backward("dout", [](BackwardInputs& in) { in.dout = nullptr; });
  backward("dx", [](BackwardInputs& in) { in.dx = nullptr; });
  backward("dtopk_weights", [](BackwardInputs& in) { in.dtopk_weights = nullptr; });
  backward("expert_gradients", [](BackwardInputs& in) { in.expert_gradients.pop_back(); });
  backward("expert_gradients.w1", [](BackwardInputs& in) { in.expert_gradients[0].w3 = nullptr; });
  backward("expert_gradients.w2", [](BackwardInputs& in) { in.expert_gradients[0].w2 = nullptr; });
  backward("shared_gradients.w2", [](BackwardInputs& in) { in.shared_gradients.w2 = nullptr; });
  backward("saved.shared_gate_up", [](BackwardInputs& in) { in.saved.shared_gate_up = nullptr; });

  const auto schedule = [&](const char* name, auto change) {
    std::vector<ExpertIds> ids = {step.ids(0), step.ids(1)};
    change(ids[1]);
    expect_refused(name, [&] { workspace.build_schedule(ids, {step.schedule(0), step.schedule(1)}); });
  };
  schedule("tokens", [](ExpertIds& ids) { ids.tokens = 6; });
  schedule("tokens", [](ExpertIds& ids) { ids.tokens = -1; });
  schedule("topk_idx", [](ExpertIds& ids) { ids.topk_idx = nullptr; });
  expect_refused("schedules", [&] { workspace.build_schedule({step.ids(0), step.ids(1)}, {step.schedule(0)}); });

  // Refused calls leave the workspace as it was.
  workspace.backward({step.backward_inputs(0), step.backward_inputs(1)}, GradientMode::kWriteBf16);
  EXPECT_EQ(step.digest_of_everything(), layer.step());
}

// Whoever needs fewer gradients gets those with the same bits.
TEST(Needs, Case34EverySubsetGivesTheSameBits) {
  ProblemSpec spec = small_layer({45, 20});
  spec.shared_intermediate = 32;
  WorkspaceOptions options;
  options.ring_rows = Workspace::min_ring_rows();
  options.saved_rows = 20;
  options.poison = true;
  LayerCase layer(spec, options);
  layer.step();
  const check::LayerTensors expected = layer.tensors();
  for (int subset = 0; subset < 64; ++subset) {
    const auto needs = [&](int bit) { return (subset >> bit & 1) != 0; };
    check::EngineStep step(layer.problem(), layer.workspace(), false);
    step.reset();
    layer.workspace().build_schedule({step.ids(0), step.ids(1)}, {step.schedule(0), step.schedule(1)});
    layer.workspace().forward({step.forward_inputs(0), step.forward_inputs(1)});
    std::vector<BackwardInputs> ranks = {step.backward_inputs(0), step.backward_inputs(1)};
    for (BackwardInputs& rank : ranks) {
      if (!needs(0)) rank.dx = nullptr;
      if (!needs(1)) rank.dtopk_weights = nullptr;
      for (ExpertGradients& expert : rank.expert_gradients) {
        if (!needs(2)) expert.w1 = expert.w3 = nullptr;
        if (!needs(3)) expert.w2 = nullptr;
      }
      if (!needs(4)) rank.shared_gradients.w1 = rank.shared_gradients.w3 = nullptr;
      if (!needs(5)) rank.shared_gradients.w2 = nullptr;
    }
    layer.workspace().backward(ranks, GradientMode::kWriteBf16);
    const check::LayerTensors tensors = step.collect();
    EXPECT_TRUE(!needs(0) || tensors.dx == expected.dx) << subset;
    EXPECT_TRUE(!needs(1) || tensors.dtopk_weights == expected.dtopk_weights) << subset;
    EXPECT_TRUE(!needs(2) || tensors.dw13 == expected.dw13) << subset;
    EXPECT_TRUE(!needs(3) || tensors.dw2 == expected.dw2) << subset;
    EXPECT_TRUE(!needs(4) || tensors.dshared_w13 == expected.dshared_w13) << subset;
    EXPECT_TRUE(!needs(5) || tensors.dshared_w2 == expected.dshared_w2) << subset;
  }
}

}  // namespace
}  // namespace clowder::test

// Engines behind one interface: which there are, and how one dies.
#include "engine/engine.h"

#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "engine/death.h"
#include "engine/layer_case.h"

namespace clowder::test {
namespace {

ErrorCode code_of(const std::function<void()>& call, const std::string& start) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).rfind(start, 0), 0u) << error.what();
    return error.code();
  }
  ADD_FAILURE() << "nothing was thrown";
  return ErrorCode::kInternal;
}

// The calls that name an engine.
std::vector<std::function<void()>> calls(EngineKind kind) {
  const LayerShape shape = check::make_problem({}, 1).shape;
  return {
      [=] {
        WorkspaceOptions options;
        options.engine = kind;
        Workspace workspace(shape, make_virtual_group(2), options);
      },
      [=] { Workspace::min_ring_rows(kind); },
      [=] { Workspace::symmetric_bytes(shape, 2, kind); },
  };
}

TEST(Engine, OneThatIsNotInTheBuildSaysSo) {
  EXPECT_TRUE(is_built(EngineKind::kCpu));
  if (is_built(EngineKind::kSm90)) GTEST_SKIP() << "this build has every engine";
  for (const auto& call : calls(EngineKind::kSm90)) {
    EXPECT_EQ(code_of(call, "engine: this build has no sm90 engine"), ErrorCode::kUnsupported);
  }
}

TEST(Engine, OneThatThereIsNotIsRefused) {
  for (const auto& call : calls(static_cast<EngineKind>(7))) {
    EXPECT_EQ(code_of(call, "engine: kind 7, must be"), ErrorCode::kArgument);
  }
}

// Streams are nothing to the CPU engine.
TEST(Engine, AStreamChangesNothingOnTheCpu) {
  check::ProblemSpec spec;
  spec.tokens_per_rank = {40};
  spec.hidden = spec.intermediate = 32;
  LayerCase layer(spec, {});
  const std::string expected = layer.step();
  check::EngineStep step(layer.problem(), layer.workspace(), false);
  step.reset();
  int anything = 0;
  const Stream stream = &anything;
  layer.workspace().build_schedule({step.ids(0)}, {step.schedule(0)}, stream);
  layer.workspace().forward({step.forward_inputs(0)}, stream);
  layer.workspace().backward({step.backward_inputs(0)}, GradientMode::kWriteBf16, stream);
  EXPECT_EQ(step.digest_of_everything(), expected);
}

TEST(Death, TheFirstCauseStaysWhoeverLooksWhen) {
  Death death;
  EXPECT_FALSE(death.has_come());
  EXPECT_NO_THROW(death.check());
  EXPECT_TRUE(death.reports().empty());
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&death, i] {
        death.record(Error(ErrorCode::kTimeout, "cause " + std::to_string(i)),
                     std::vector<WaitReport>(static_cast<std::size_t>(i) + 1));
      });
      threads.emplace_back([&death] {
        while (!death.has_come()) std::this_thread::yield();
        EXPECT_FALSE(death.reports().empty());
        EXPECT_THROW(death.check(), Error);
      });
    }
  }
  const std::size_t cause = death.reports().size() - 1;
  EXPECT_EQ(code_of([&] { death.check(); }, "the workspace is dead"), ErrorCode::kTimeout);
  try {
    death.check();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("cause " + std::to_string(cause)), std::string::npos) << error.what();
  }
  death.record(Error(ErrorCode::kInternal, "late"));
  EXPECT_EQ(death.reports().size(), cause + 1);
}

}  // namespace
}  // namespace clowder::test

// Launches by themselves: epochs that wrap around, and tasks that fail.
#include "engine/cpu/launch.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace clowder::cpu {
namespace {

struct Nothing : TaskBodies {
  void execute(const plan::Task&, const Scratch&) override {}
};

struct Failing : TaskBodies {
  void execute(const plan::Task& task, const Scratch&) override {
    if (task.rank() == 1) throw std::runtime_error("on purpose");
  }
};

class LaunchTest : public testing::Test {
 protected:
  LaunchTest() {
    LayerShape shape;
    shape.hidden = shape.intermediate = 32;
    shape.num_experts = 3;
    shape.topk = 1;
    const SymmetricLayout layout(shape, 3);
    for (int rank = 0; rank < 3; ++rank) {
      parts_.push_back(allocate_zeroed(layout.bytes()));
      memory_.push_back(layout.view(parts_.back().get()));
    }
  }

  std::vector<WaitReport> launch(const PassPlan& plan, std::uint32_t epoch, TaskBodies& bodies) {
    LaunchOptions options;
    options.blocks = 2;
    options.timeout_s = 0.2;
    Launch launch(plan, memory_, epoch, scratch_, options);
    launch.run(bodies);
    return launch.reports();
  }

  std::vector<AlignedMemory> parts_;
  std::vector<RankMemory> memory_;
  ScratchPool scratch_;
  Nothing nothing_;
};

TEST_F(LaunchTest, EpochsMayWrapAround) {
  const PassPlan all({0, 1, 2});
  const PassPlan two({0, 1});
  for (const RankMemory& reader : memory_) {
    for (int writer = 0; writer < 3; ++writer) reader.flag(plan::FlagKind::kIdsReady, writer).store(0xfffffffdu);
  }
  for (const std::uint32_t epoch : {0xfffffffeu, 0xffffffffu, 0u, 1u}) {
    const std::vector<WaitReport> without = launch(two, epoch, nothing_);
    ASSERT_EQ(without.size(), 2u) << "a flag of an epoch before is not this one's";
    EXPECT_EQ(without[0].waited_for, 2);
    EXPECT_TRUE(launch(all, epoch, nothing_).empty());
  }
}

TEST_F(LaunchTest, ATaskThatThrowsMakesAllLeave) {
  const PassPlan all({0, 1, 2});
  Failing failing;
  EXPECT_THROW(launch(all, 1, failing), std::runtime_error);
}

}  // namespace
}  // namespace clowder::cpu

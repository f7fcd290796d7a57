// Arguments that cannot be used, from C++: each gives one error that names it, and leaves everything as it was.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <new>
#include <thread>

#include "engine/layer_case.h"
#include "group/aligned_memory.h"

namespace clowder::test {
namespace {

constexpr std::int64_t kHuge = std::int64_t{1} << 62;
constexpr std::int64_t kLeast = std::numeric_limits<std::int64_t>::min();

check::ProblemSpec small_layer() {
  check::ProblemSpec spec;
  spec.tokens_per_rank = {5, 4};
  spec.hidden = spec.intermediate = spec.shared_intermediate = 32;
  spec.num_experts = 4;
  return spec;
}

WorkspaceOptions options() {
  WorkspaceOptions options;
  options.keep_x = true;
  options.timeout_s = 10.0;
  return options;
}

// A group of a user's own that says and gives what a test wants.
class OddGroup : public Group {
 public:
  OddGroup(int size, std::vector<int> ranks, std::shared_ptr<SymmetricMemory> memory = nullptr)
      : size_(size), ranks_(std::move(ranks)), memory_(std::move(memory)) {}
  int size() const override { return size_; }
  const std::vector<int>& local_ranks() const override { return ranks_; }
  std::shared_ptr<SymmetricMemory> allocate(std::size_t) override { return memory_; }

 private:
  int size_;
  std::vector<int> ranks_;
  std::shared_ptr<SymmetricMemory> memory_;
};

class OddMemory : public SymmetricMemory {
 public:
  explicit OddMemory(std::byte* base) : base_(base) {}
  std::byte* base(int) const override { return base_; }

 private:
  std::byte* base_;
};

// A layer that has run a step, whose calls the cases break one argument at a time.
class Layer {
 public:
  Layer()
      : layer_(small_layer(), options()), step_(layer_.problem(), layer_.workspace(), true), digest_(layer_.step()) {
    good_step();
  }

  const LayerShape& shape() const { return layer_.problem().shape; }
  Workspace& workspace() { return layer_.workspace(); }
  check::EngineStep& step() { return step_; }

  void good_step() {
    step_.reset();
    step_.run(workspace());
    ASSERT_EQ(step_.digest_of_everything(), digest_);
  }

  void with_shape(const std::function<void(LayerShape&)>& change, int ranks = 2) const {
    LayerShape bad = shape();
    change(bad);
    Workspace workspace(bad, make_virtual_group(ranks), options());
  }
  void with_options(const std::function<void(WorkspaceOptions&)>& change) const {
    WorkspaceOptions bad = options();
    change(bad);
    Workspace workspace(shape(), make_virtual_group(2), bad);
  }
  void with_group(std::shared_ptr<Group> group) const { Workspace workspace(shape(), std::move(group), options()); }

  // The second rank's arguments, or the vectors as a whole.
  void schedule(const std::function<void(std::vector<ExpertIds>&, std::vector<std::int32_t*>&)>& change) {
    std::vector<ExpertIds> ids = {step_.ids(0), step_.ids(1)};
    std::vector<std::int32_t*> schedules = {step_.schedule(0), step_.schedule(1)};
    change(ids, schedules);
    workspace().build_schedule(ids, schedules);
  }
  void forward(const std::function<void(std::vector<ForwardInputs>&)>& change) {
    std::vector<ForwardInputs> ranks = {step_.forward_inputs(0), step_.forward_inputs(1)};
    change(ranks);
    workspace().forward(ranks);
  }
  void backward(const std::function<void(std::vector<BackwardInputs>&)>& change,
                GradientMode mode = GradientMode::kWriteBf16) {
    std::vector<BackwardInputs> ranks = {step_.backward_inputs(0), step_.backward_inputs(1)};
    change(ranks);
    workspace().backward(ranks, mode);
  }

 private:
  LayerCase layer_;
  check::EngineStep step_;
  std::string digest_;
};

struct Bad {
  const char* begins;  // what the message begins with: the argument's name
  std::function<void(Layer&)> call;
  ErrorCode code = ErrorCode::kArgument;
};

using Shape = LayerShape;
using Options = WorkspaceOptions;
using Ids = std::vector<ExpertIds>;
using Schedules = std::vector<std::int32_t*>;
using Forward = std::vector<ForwardInputs>;
using Backward = std::vector<BackwardInputs>;

std::vector<Bad> bad_shapes() {
  return {
      {"hidden: 0,", [](Layer& l) { l.with_shape([](Shape& s) { s.hidden = 0; }); }},
      {"hidden: 48,", [](Layer& l) { l.with_shape([](Shape& s) { s.hidden = 48; }); }},
      {"hidden: 4611686018427387904,", [](Layer& l) { l.with_shape([](Shape& s) { s.hidden = kHuge; }); }},
      {"intermediate: -32,", [](Layer& l) { l.with_shape([](Shape& s) { s.intermediate = -32; }); }},
      {"intermediate: 4611686018427387904,", [](Layer& l) { l.with_shape([](Shape& s) { s.intermediate = kHuge; }); }},
      {"shared_intermediate: 16,", [](Layer& l) { l.with_shape([](Shape& s) { s.shared_intermediate = 16; }); }},
      {"shared_intermediate: -9223372036854775808,",
       [](Layer& l) { l.with_shape([](Shape& s) { s.shared_intermediate = kLeast; }); }},
      {"num_experts: 0,", [](Layer& l) { l.with_shape([](Shape& s) { s.num_experts = 0; }); }},
      {"num_experts: -4,", [](Layer& l) { l.with_shape([](Shape& s) { s.num_experts = -4; }); }},
      {"num_experts: 2147483647,", [](Layer& l) { l.with_shape([](Shape& s) { s.num_experts = 2147483647; }); }},
      {"num_experts: 4,", [](Layer& l) { l.with_shape([](Shape&) {}, 3); }},
      {"num_experts: 4,", [](Layer& l) { l.with_shape([](Shape&) {}, 8); }},
      {"topk: 0,", [](Layer& l) { l.with_shape([](Shape& s) { s.topk = 0; }); }},
      {"topk: 17,", [](Layer& l) { l.with_shape([](Shape& s) { s.topk = 17; }); }},
      {"max_tokens: -1,", [](Layer& l) { l.with_shape([](Shape& s) { s.max_tokens = -1; }); }},
      {"max_tokens: 4611686018427387904,", [](Layer& l) { l.with_shape([](Shape& s) { s.max_tokens = kHuge; }); }},
      {"max_tokens: 1073741824,", [](Layer& l) { l.with_shape([](Shape& s) { s.max_tokens = 1 << 30; }); }},
      {"activation: kind 99,",
       [](Layer& l) { l.with_shape([](Shape& s) { s.activation.kind = static_cast<ActivationKind>(99); }); }},
      {"activation: a clamp with limit",
       [](Layer& l) { l.with_shape([](Shape& s) {
                        s.activation = {ActivationKind::kSwigluClamp, -1.0f};
                      }); }},
      {"hidden: 1,",
       [](Layer& l) {
         LayerShape bad = l.shape();
         bad.hidden = 1;
         Workspace::symmetric_bytes(bad, 2);
       }},
      {"group: 0,", [](Layer& l) { Workspace::symmetric_bytes(l.shape(), 0); }},
  };
}

std::vector<Bad> bad_options() {
  const auto timeout = [](double seconds) {
    return [seconds](Layer& l) { l.with_options([seconds](Options& o) { o.timeout_s = seconds; }); };
  };
  return {
      {"ring_rows: 1,", [](Layer& l) { l.with_options([](Options& o) { o.ring_rows = 1; }); }},
      {"ring_rows: -9223372036854775808,", [](Layer& l) { l.with_options([](Options& o) { o.ring_rows = kLeast; }); }},
      {"saved_rows: -2,", [](Layer& l) { l.with_options([](Options& o) { o.saved_rows = -2; }); }},
      {"chunk_rows: 0,", [](Layer& l) { l.with_options([](Options& o) { o.chunk_rows = 0; }); }},
      {"chunk_rows: -9223372036854775808,",
       [](Layer& l) { l.with_options([](Options& o) { o.chunk_rows = kLeast; }); }},
      {"blocks: 0,", [](Layer& l) { l.with_options([](Options& o) { o.blocks = 0; }); }},
      {"blocks: 2147483647,", [](Layer& l) { l.with_options([](Options& o) { o.blocks = 2147483647; }); }},
      {"timeout_s: 0", timeout(0.0)},
      {"timeout_s: -1", timeout(-1.0)},
      {"timeout_s: nan", timeout(std::nan(""))},
      {"timeout_s: inf", timeout(std::numeric_limits<double>::infinity())},
      {"engine: kind 9,", [](Layer& l) { l.with_options([](Options& o) { o.engine = static_cast<EngineKind>(9); }); }},
  };
}

std::vector<Bad> bad_groups() {
  static const AlignedMemory kPage = allocate_zeroed(4096);
  std::byte* const page = kPage.get();
  return {
      {"group: a null pointer,", [](Layer& l) { l.with_group(nullptr); }},
      {"group: 0 local ranks", [](Layer& l) { l.with_group(std::make_shared<OddGroup>(2, std::vector<int>{})); }},
      {"group: 1 local ranks", [](Layer& l) { l.with_group(std::make_shared<OddGroup>(2, std::vector<int>{2})); }},
      {"group: 1 local ranks", [](Layer& l) { l.with_group(std::make_shared<OddGroup>(2, std::vector<int>{-1})); }},
      {"group: 2 local ranks",
       [](Layer& l) {
         l.with_group(std::make_shared<OddGroup>(2, std::vector<int>{1, 0}));
       }},
      {"group: 2 local ranks",
       [](Layer& l) {
         l.with_group(std::make_shared<OddGroup>(2, std::vector<int>{1, 1}));
       }},
      {"group.allocate: a null pointer,",
       [](Layer& l) {
         l.with_group(std::make_shared<OddGroup>(2, std::vector<int>{0, 1}));
       }},
      {"group.allocate: a null pointer,",
       [](Layer& l) {
         l.with_group(std::make_shared<OddGroup>(2, std::vector<int>{0}, std::make_shared<OddMemory>(nullptr)));
       }},
      {"group.allocate: memory of rank 0",
       [page](Layer& l) {
         l.with_group(std::make_shared<OddGroup>(2, std::vector<int>{0}, std::make_shared<OddMemory>(page + 8)));
       }},
      {"ranks: 0,", [](Layer&) { make_virtual_group(0); }},
      {"ranks: -2147483648,", [](Layer&) { make_virtual_group(std::numeric_limits<int>::min()); }},
      {"ranks: 2147483647,", [](Layer&) { make_virtual_group(std::numeric_limits<int>::max()); }},
      {"ranks: -1,", [](Layer&) { make_threaded_groups(-1, 1.0); }},
      {"timeout_s: nan", [](Layer&) { make_threaded_groups(2, std::nan("")); }},
      {"ranks: 0,", [](Layer&) { make_caller_owned_group(0, {}, 4096); }},
      {"rank: 1,", [page](Layer&) { make_caller_owned_group(1, {page}, 4096); }},
      {"rank: -1,", [page](Layer&) { make_caller_owned_group(-1, {page}, 4096); }},
      {"bases[1]: a null pointer,",
       [page](Layer&) {
         make_caller_owned_group(0, {page, nullptr}, 4096);
       }},
      {"bases[0]: memory that is not aligned,", [page](Layer&) { make_caller_owned_group(0, {page + 1}, 4000); }},
      {"bytes_per_rank: 256,",
       [page](Layer& l) {
         l.with_group(make_caller_owned_group(0, {page, page}, 256));
       }},
      {"group: its memory serves a workspace already,",
       [](Layer& l) {
         const std::size_t bytes = Workspace::symmetric_bytes(l.shape(), 1);
         const AlignedMemory memory = allocate_zeroed(bytes);
         const auto group = make_caller_owned_group(0, {memory.get()}, bytes);
         const Workspace first(l.shape(), group, options());
         l.with_group(group);
       }},
  };
}

std::vector<Bad> bad_schedules() {
  return {
      {"ids: 0 entries,", [](Layer& l) { l.schedule([](Ids& ids, Schedules&) { ids.clear(); }); }},
      {"ids: 3 entries,", [](Layer& l) { l.schedule([](Ids& ids, Schedules&) { ids.push_back(ids[0]); }); }},
      {"schedules: 1 entries,", [](Layer& l) { l.schedule([](Ids&, Schedules& s) { s.pop_back(); }); }},
      {"schedules: a null pointer,", [](Layer& l) { l.schedule([](Ids&, Schedules& s) { s[1] = nullptr; }); }},
      {"tokens: -1,", [](Layer& l) { l.schedule([](Ids& ids, Schedules&) { ids[1].tokens = -1; }); }},
      {"tokens: 6,", [](Layer& l) { l.schedule([](Ids& ids, Schedules&) { ids[1].tokens = 6; }); }},
      {"tokens: 4611686018427387904,",
       [](Layer& l) { l.schedule([](Ids& ids, Schedules&) { ids[0].tokens = kHuge; }); }},
      {"topk_idx: a null pointer,",
       [](Layer& l) { l.schedule([](Ids& ids, Schedules&) { ids[1].topk_idx = nullptr; }); }},
      {"schedule: a null pointer,", [](Layer& l) { summarise(l.shape(), 2, nullptr); }},
      {"group: 0,", [](Layer& l) { summarise(l.shape(), 0, l.step().schedule(0)); }},
      {"schedule: not one of this layer,",
       [](Layer& l) {
         LayerShape other = l.shape();
         other.topk = 1;
         summarise(other, 2, l.step().schedule(0));
       }},
  };
}

std::vector<Bad> bad_forwards() {
  static const std::vector<std::int32_t> kZeros(4096);
  return {
      {"ranks: 0 entries,", [](Layer& l) { l.forward([](Forward& r) { r.clear(); }); }},
      {"ranks: 3 entries,", [](Layer& l) { l.forward([](Forward& r) { r.push_back(r[0]); }); }},
      {"schedule: a null pointer,", [](Layer& l) { l.forward([](Forward& r) { r[1].schedule = nullptr; }); }},
      {"schedule: not one of this layer and of rank 1,",
       [](Layer& l) { l.forward([](Forward& r) { r[1].schedule = kZeros.data(); }); }},
      {"schedule: not one of this layer and of rank 0,",
       [](Layer& l) { l.forward([](Forward& r) { std::swap(r[0].schedule, r[1].schedule); }); }},
      {"x: a null pointer,", [](Layer& l) { l.forward([](Forward& r) { r[0].x = nullptr; }); }},
      {"topk_weights: a null pointer,", [](Layer& l) { l.forward([](Forward& r) { r[0].topk_weights = nullptr; }); }},
      {"out: a null pointer,", [](Layer& l) { l.forward([](Forward& r) { r[1].out = nullptr; }); }},
      {"experts: 0 entries,", [](Layer& l) { l.forward([](Forward& r) { r[0].experts.clear(); }); }},
      {"experts: 3 entries,", [](Layer& l) { l.forward([](Forward& r) { r[0].experts.emplace_back(); }); }},
      {"experts.w1: a null pointer,", [](Layer& l) { l.forward([](Forward& r) { r[1].experts[0].w1 = nullptr; }); }},
      {"experts.w3: a null pointer,", [](Layer& l) { l.forward([](Forward& r) { r[1].experts[1].w3 = nullptr; }); }},
      {"experts.w2: a null pointer,", [](Layer& l) { l.forward([](Forward& r) { r[0].experts[1].w2 = nullptr; }); }},
      {"shared.w1: a null pointer,", [](Layer& l) { l.forward([](Forward& r) { r[1].shared.w1 = nullptr; }); }},
      {"shared.w2: a null pointer,",
       [](Layer& l) {
         l.forward([](Forward& r) {
           r[1].shared = {};
           r[1].shared.w1 = r[0].shared.w1;
           r[1].shared.w3 = r[0].shared.w3;
         });
       }},
      {"saved.gate_up: null for some", [](Layer& l) { l.forward([](Forward& r) { r[0].saved.gate_up = nullptr; }); }},
      {"saved.x: a null pointer,", [](Layer& l) { l.forward([](Forward& r) { r[1].saved.x = nullptr; }); }},
  };
}

std::vector<Bad> bad_backwards() {
  return {
      {"ranks: 1 entries,", [](Layer& l) { l.backward([](Backward& r) { r.pop_back(); }); }},
      {"mode: 17,", [](Layer& l) { l.backward([](Backward&) {}, static_cast<GradientMode>(17)); }},
      {"schedule: a null pointer,", [](Layer& l) { l.backward([](Backward& r) { r[0].schedule = nullptr; }); }},
      {"x: a null pointer,", [](Layer& l) { l.backward([](Backward& r) { r[1].x = nullptr; }); }},
      {"dout: a null pointer,", [](Layer& l) { l.backward([](Backward& r) { r[1].dout = nullptr; }); }},
      {"topk_weights: a null pointer,", [](Layer& l) { l.backward([](Backward& r) { r[0].topk_weights = nullptr; }); }},
      {"experts: 1 entries,", [](Layer& l) { l.backward([](Backward& r) { r[0].experts.pop_back(); }); }},
      {"saved.shared_gate_up: a null pointer,",
       [](Layer& l) { l.backward([](Backward& r) { r[1].saved.shared_gate_up = nullptr; }); }},
      {"saved.gate_up: null for some", [](Layer& l) { l.backward([](Backward& r) { r[1].saved.gate_up = nullptr; }); }},
      {"saved.x: a null pointer,", [](Layer& l) { l.backward([](Backward& r) { r[0].saved.x = nullptr; }); }},
      {"dx: null for some", [](Layer& l) { l.backward([](Backward& r) { r[0].dx = nullptr; }); }},
      {"dtopk_weights: null for some", [](Layer& l) { l.backward([](Backward& r) { r[1].dtopk_weights = nullptr; }); }},
      {"expert_gradients: 1 entries,",
       [](Layer& l) { l.backward([](Backward& r) { r[0].expert_gradients.pop_back(); }); }},
      {"expert_gradients.w1, .w3: null for some",
       [](Layer& l) { l.backward([](Backward& r) { r[0].expert_gradients[1].w3 = nullptr; }); }},
      {"expert_gradients.w2: null for some",
       [](Layer& l) { l.backward([](Backward& r) { r[1].expert_gradients[0].w2 = nullptr; }); }},
      {"shared_gradients.w1, .w3: null for some",
       [](Layer& l) { l.backward([](Backward& r) { r[1].shared_gradients.w1 = nullptr; }); }},
      {"shared_gradients.w2: null for some",
       [](Layer& l) { l.backward([](Backward& r) { r[0].shared_gradients.w2 = nullptr; }); }},
  };
}

class BadArguments : public testing::TestWithParam<std::vector<Bad> (*)()> {};

TEST_P(BadArguments, EachIsNamedAndLeavesTheWorkspaceAsItWas) {
  Layer layer;
  for (const Bad& bad : GetParam()()) {
    SCOPED_TRACE(bad.begins);
    try {
      bad.call(layer);
      ADD_FAILURE() << "was not refused";
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_EQ(error.code(), bad.code) << message;
      EXPECT_EQ(message.rfind(bad.begins, 0), 0u) << message;
      EXPECT_NE(message.find(", must be "), std::string::npos) << message;
      EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    } catch (const std::exception& error) {
      ADD_FAILURE() << "another kind of error: " << error.what();
    }
    EXPECT_FALSE(layer.workspace().is_dead());
    layer.good_step();
  }
}

INSTANTIATE_TEST_SUITE_P(Table, BadArguments,
                         testing::Values(bad_shapes, bad_options, bad_groups, bad_schedules, bad_forwards,
                                         bad_backwards));

// Sizes that no sum or product may overflow for. What is too large for a rank's routing is cut, not allocated.
TEST(LargeArguments, HugeTuningIsCutToWhatTheLayerCanFill) {
  for (const std::int64_t huge : {kHuge, std::numeric_limits<std::int64_t>::max()}) {
    WorkspaceOptions large = options();
    large.ring_rows = large.chunk_rows = large.saved_rows = huge;
    Workspace workspace(check::make_problem(small_layer(), 1).shape, make_virtual_group(2), large);
    EXPECT_LE(workspace.ring_rows(), 1000);
    EXPECT_EQ(workspace.saved_rows(), 2 * 5 * 2);
  }
}

class PoorGroup : public OddGroup {
 public:
  PoorGroup() : OddGroup(2, {0, 1}) {}
  std::shared_ptr<SymmetricMemory> allocate(std::size_t) override { throw std::bad_alloc(); }
};

TEST(LargeArguments, TooLittleMemoryIsAnErrorOfItsOwn) {
  try {
    Workspace workspace(check::make_problem(small_layer(), 1).shape, std::make_shared<PoorGroup>(), options());
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_EQ(std::string(error.what()).rfind("memory: ", 0), 0u) << error.what();
  }
}

// Ranks that ask for layers of different shapes must not wait for each other.
TEST(BadArguments, RanksOfDifferentShapes) {
  const LayerShape shape = check::make_problem(small_layer(), 1).shape;
  LayerShape other = shape;
  other.max_tokens = 400;
  const auto groups = make_threaded_groups(2, 0.3);
  int refused = 0;
  int timed_out = 0;
  const auto create = [&](int rank) {
    try {
      Workspace workspace(rank == 0 ? shape : other, groups[static_cast<std::size_t>(rank)], options());
      ADD_FAILURE() << "rank " << rank << " has a workspace";
    } catch (const Error& error) {
      (error.code() == ErrorCode::kArgument ? refused : timed_out) += 1;
      if (error.code() == ErrorCode::kArgument) {
        EXPECT_EQ(std::string(error.what()).rfind("workspace: rank", 0), 0u) << error.what();
      }
    }
  };
  std::thread first(create, 0);
  first.join();
  std::thread second(create, 1);
  second.join();
  EXPECT_EQ(refused, 1);
  EXPECT_EQ(timed_out, 1);
}

}  // namespace
}  // namespace clowder::test

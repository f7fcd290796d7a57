// docs/memory.md: its formulas and its tables say what the library takes.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "clowder/layer.h"
#include "engine/cpu/launch.h"
#include "engine/cpu/rank_buffers.h"
#include "engine/cpu/tiles.h"
#include "plan/random.h"

namespace clowder::test {
namespace {

// One rank of a group of any size, without memory: workspaces can be asked for their sizes, and no more.
class PaperGroup : public Group {
 public:
  explicit PaperGroup(int size) : size_(size) {}
  int size() const override { return size_; }
  const std::vector<int>& local_ranks() const override { return local_ranks_; }
  std::shared_ptr<SymmetricMemory> allocate(std::size_t) override { return std::make_shared<Nowhere>(); }

 private:
  struct Nowhere : SymmetricMemory {
    // An address that nobody reads from or writes to.
    std::byte* base(int) const override {
      alignas(4096) static std::byte nowhere;
      return &nowhere;
    }
  };
  int size_;
  std::vector<int> local_ranks_{0};
};

struct Sizes {
  std::int64_t ring_rows, saved_rows;
  // Bytes of one rank.
  std::int64_t saved, saved_shared, kept_x, schedule, symmetric, forward, both_passes;
};

LayerShape make_shape(std::int64_t hidden, std::int64_t intermediate, std::int32_t experts, std::int32_t topk,
                      std::int64_t shared, std::int64_t max_tokens) {
  LayerShape shape;
  shape.hidden = hidden;
  shape.intermediate = intermediate;
  shape.num_experts = experts;
  shape.topk = topk;
  shape.shared_intermediate = shared;
  shape.max_tokens = max_tokens;
  return shape;
}

// What the library takes.
Sizes measure(const LayerShape& shape, int ranks, const WorkspaceOptions& options) {
  const Workspace workspace(shape, std::make_shared<PaperGroup>(ranks), options);
  Sizes sizes{};
  sizes.ring_rows = workspace.ring_rows();
  sizes.saved_rows = workspace.saved_rows();
  const auto bf16_bytes = static_cast<std::int64_t>(sizeof(bf16));
  sizes.saved = sizes.saved_rows * 2 * shape.intermediate * bf16_bytes;  // as SavedTensors says
  sizes.saved_shared = shape.max_tokens * 2 * shape.shared_intermediate * bf16_bytes;
  sizes.kept_x = options.keep_x ? sizes.saved_rows * shape.hidden * bf16_bytes : 0;
  sizes.schedule = workspace.schedule_words() * static_cast<std::int64_t>(sizeof(std::int32_t));
  sizes.symmetric = static_cast<std::int64_t>(Workspace::symmetric_bytes(shape, ranks));

  plan::PassShape pass;
  pass.pass = plan::Pass::kBackward;
  pass.ring = plan::make_ring(cpu::kBlockRows, sizes.ring_rows, 1);
  pass.tiles = cpu::make_tile_counts(shape);
  cpu::RankBuffers buffers;
  buffers.reserve_forward(shape, sizes.ring_rows);
  sizes.forward = buffers.bytes();
  buffers.reserve_backward(shape, pass);
  sizes.both_passes = buffers.bytes();
  return sizes;
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// The formulas of the page, in its letters.
Sizes calculate(const LayerShape& shape, std::int64_t R, std::int64_t Q, std::int64_t S, bool keep_x) {
  const std::int64_t H = shape.hidden, I = shape.intermediate, Is = shape.shared_intermediate;
  const std::int64_t E = shape.num_experts, K = shape.topk, T = shape.max_tokens;
  const auto lines = [](std::int64_t bytes) { return ceil_div(bytes, 64) * 64; };
  Sizes sizes{};
  sizes.ring_rows = Q;
  sizes.saved_rows = S;
  sizes.saved = 4 * I * S;
  sizes.saved_shared = 4 * Is * T;
  sizes.kept_x = keep_x ? 2 * H * S : 0;
  sizes.schedule = 4 * (4 + R + E + E / R + T + R * T * K);
  const std::int64_t staged = R > 1 ? 2 * lines(2 * T * H) + lines(4 * T * K) : 0;
  sizes.symmetric = lines(2 * T * K * H) + 2 * lines(4 + 4 * T * K) + lines(4 * T * K) + staged + 192 * R;
  sizes.forward = Q * (2 * H + 2 * I) + 2 * Is * T;
  const std::int64_t carry = 196608 * ceil_div(I, 128) * ceil_div(H, 128);
  sizes.both_passes = sizes.forward + Q * (2 * H + 10 * I + 4 * ceil_div(I, 128) + 4) + carry + 6 * Is * T;
  return sizes;
}

static_assert(sizeof(float) * cpu::kLanes == 128 && cpu::kScratchSums == 640, "the page has a worker's scratch");

// Shapes of any kind, rings and saved rows within what the worst routing fills: the formulas hold to the byte.
TEST(MemoryPage, FormulasHold) {
  plan::explore::Random random(7);
  for (int i = 0; i < 200; ++i) {
    const int ranks = random.pick({1, 2, 3, 8});
    const LayerShape shape =
        make_shape(32 * random.between(1, 40), 32 * random.between(1, 40), ranks * random.between(1, 9),
                   random.between(1, 8), random.chance(0.5) ? 0 : 32 * random.between(1, 20), random.between(1, 700));
    WorkspaceOptions options;
    options.keep_x = random.chance(0.5);
    options.ring_rows = random.chance(0.3) ? WorkspaceOptions::kDefault : random.between(96, 2000);
    options.saved_rows = random.chance(0.3) ? WorkspaceOptions::kDefault : random.between(0, 2000);
    const Sizes taken = measure(shape, ranks, options);
    const Sizes formula = calculate(shape, ranks, taken.ring_rows, taken.saved_rows, options.keep_x);
    EXPECT_EQ(taken.saved, formula.saved);
    EXPECT_EQ(taken.saved_shared, formula.saved_shared);
    EXPECT_EQ(taken.kept_x, formula.kept_x);
    EXPECT_EQ(taken.schedule, formula.schedule);
    EXPECT_EQ(taken.symmetric, formula.symmetric);
    EXPECT_EQ(taken.forward, formula.forward);
    EXPECT_EQ(taken.both_passes, formula.both_passes);
  }
}

// The defaults that the page gives: chunks of 256 rows, no more rows than the worst routing fills.
TEST(MemoryPage, DefaultsHold) {
  for (const std::int64_t tokens : {1, 20, 100, 1001, 8192}) {
    const LayerShape shape = make_shape(64, 64, 16, 3, 0, tokens);
    const Sizes taken = measure(shape, 4, {});
    const std::int64_t slots = 3 * tokens;
    const std::int64_t saved = ceil_div(5 * slots, 4);
    EXPECT_EQ(taken.saved_rows, saved) << tokens;
    const std::int64_t worst_blocks = std::max<std::int64_t>(4 * slots / 32 + 4, 3);
    const std::int64_t chunk = std::min<std::int64_t>(256, 32 * worst_blocks);
    const std::int64_t ring = std::max(3 * chunk, ceil_div(saved, 4));
    EXPECT_EQ(taken.ring_rows, std::min(ring, 32 * worst_blocks) / 32 * 32) << tokens;
  }
}

std::string mebibytes(std::int64_t bytes) { return std::to_string((bytes + (1 << 19)) >> 20); }

std::string row(const std::vector<std::string>& cells) {
  std::string line = "|";
  for (const std::string& cell : cells) line += " " + cell + " |";
  return line + "\n";
}

std::string sizes_of_models() {
  struct Model {
    const char* name;
    LayerShape shape;
    int ranks;
  };
  constexpr std::int64_t kTokens = 8192;
  const LayerShape deepseek = make_shape(7168, 2048, 256, 8, 2048, kTokens);
  const LayerShape qwen_30b = make_shape(2048, 768, 128, 8, 0, kTokens);
  const Model models[] = {
      {"DeepSeek-V3", deepseek, 8},
      {"DeepSeek-V3", deepseek, 32},
      {"Qwen3-30B-A3B", qwen_30b, 1},
      {"Qwen3-30B-A3B", qwen_30b, 8},
      {"Qwen3-235B-A22B", make_shape(4096, 1536, 128, 8, 0, kTokens), 8},
      {"Mixtral-8x7B", make_shape(4096, 14336, 8, 2, 0, kTokens), 8},
      {"OLMoE-1B-7B", make_shape(2048, 1024, 64, 8, 0, kTokens), 8},
      {"gpt-oss-like", make_shape(2880, 2880, 32, 4, 0, kTokens), 8},
  };
  std::string table = row({"layer", "H, I, E, K, Is", "R", "saved_rows", "ring_rows", "g and u", "shared g and u",
                           "keep_x adds", "schedule", "symmetric memory", "rings, forward", "rings, both passes"}) +
                      "|---|---|---|---|---|---|---|---|---|---|---|---|\n";
  for (const auto& [name, shape, ranks] : models) {
    WorkspaceOptions options;
    options.keep_x = true;
    const Sizes sizes = measure(shape, ranks, options);
    std::ostringstream widths;
    widths << shape.hidden << ", " << shape.intermediate << ", " << shape.num_experts << ", " << shape.topk << ", "
           << shape.shared_intermediate;
    table += row({name, widths.str(), std::to_string(ranks), std::to_string(sizes.saved_rows),
                  std::to_string(sizes.ring_rows), mebibytes(sizes.saved), mebibytes(sizes.saved_shared),
                  mebibytes(sizes.kept_x), mebibytes(sizes.schedule), mebibytes(sizes.symmetric),
                  mebibytes(sizes.forward), mebibytes(sizes.both_passes)});
  }
  return table;
}

std::string settings_of_one_model() {
  struct Setting {
    const char* text;
    std::int64_t ring_rows, saved_rows;
    bool keep_x;
  };
  constexpr std::int64_t kDefault = WorkspaceOptions::kDefault;
  const Setting settings[] = {
      {"defaults", kDefault, kDefault, false},     {"`keep_x=True`", kDefault, kDefault, true},
      {"`saved_rows=0`", kDefault, 0, false},      {"`saved_rows=65536`", kDefault, 65536, false},
      {"`ring_rows=4096`", 4096, kDefault, false}, {"`ring_rows=96, saved_rows=0`", 96, 0, false},
  };
  std::string table = row({"setting", "saved for backward", "symmetric memory", "rings, both passes", "sum"}) +
                      "|---|---|---|---|---|\n";
  const LayerShape shape = make_shape(7168, 2048, 256, 8, 2048, 8192);
  for (const Setting& setting : settings) {
    WorkspaceOptions options;
    options.ring_rows = setting.ring_rows;
    options.saved_rows = setting.saved_rows;
    options.keep_x = setting.keep_x;
    const Sizes sizes = measure(shape, 8, options);
    const std::int64_t saved = sizes.saved + sizes.saved_shared + sizes.kept_x + sizes.schedule;
    table += row({setting.text, mebibytes(saved), mebibytes(sizes.symmetric), mebibytes(sizes.both_passes),
                  mebibytes(saved + sizes.symmetric + sizes.both_passes)});
  }
  return table;
}

void expect_on_page(const std::string& table) {
  const std::string path = std::string(CLOWDER_SOURCE_DIR) + "/docs/memory.md";
  std::ifstream file(path);
  ASSERT_TRUE(file) << path;
  const std::string page{std::istreambuf_iterator<char>(file), {}};
  EXPECT_TRUE(page.find(table) != std::string::npos) << "docs/memory.md is stale. Its table has to be\n" << table;
}

TEST(MemoryPage, TableOfModelsIsUpToDate) { expect_on_page(sizes_of_models()); }
TEST(MemoryPage, TableOfSettingsIsUpToDate) { expect_on_page(settings_of_one_model()); }

}  // namespace
}  // namespace clowder::test

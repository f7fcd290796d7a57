#include "engine/sm90/engine.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "engine/arguments.h"
#include "engine/death.h"
#include "engine/sm90/cuda_support.h"
#include "engine/sm90/forward_launch.h"
#include "engine/sm90/plan_kernel.h"
#include "engine/sm90/schedule_kernel.h"
#include "engine/sm90/tensor_map.h"
#include "engine/sm90/tiles.h"
#include "engine/sm90/timeline_recorder.h"

namespace clowder::sm90 {
namespace {

plan::TileCounts make_tile_counts(const LayerShape& shape) {
  plan::TileCounts tiles;
  tiles.up = plan::ceil_div(shape.intermediate, kHalfColumns);
  tiles.down = plan::ceil_div(shape.hidden, kTileColumns);
  tiles.shared_up = plan::ceil_div(shape.shared_intermediate, kHalfColumns);
  tiles.out = tiles.down;
  return tiles;
}

int num_multiprocessors() {
  int device = 0;
  int count = 0;
  require(cudaGetDevice(&device), "asking for the current device");
  require(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "asking for the device's size");
  return count;
}

bool has_hopper() {
  int device = 0;
  int major = 0;
  int minor = 0;
  const bool is_known = cudaGetDevice(&device) == cudaSuccess &&
                        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
                        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess;
  // An error that is not read stays for whoever asks next.
  cudaGetLastError();
  return is_known && major == 9 && minor == 0;
}

// A chunk keeps at least 1.2 waves of gate/up tiles busy, and whole experts of usual sizes stay in one.
std::int64_t default_chunk_rows(const LayerShape& shape, int blocks) {
  constexpr std::int64_t kLeastBlocks = 32;
  const std::int64_t clusters = std::max(1, blocks / kClusterBlocks);
  const std::int64_t pairs = plan::ceil_div(clusters * 6, 5 * make_tile_counts(shape).up);
  return std::max(kLeastBlocks, kClusterBlocks * pairs) * kBlockRows;
}

EngineLimits limits(const LayerShape& shape, const WorkspaceOptions& options) {
  const int blocks = options.blocks == WorkspaceOptions::kDefault ? num_multiprocessors() : options.blocks;
  return {kBlockRows, default_chunk_rows(shape, blocks), num_multiprocessors(), make_tile_counts(shape)};
}

// One rank's workspace memory.
struct RankMemory {
  DeviceBuffer<bf16> h;         // [ring_rows, I]
  DeviceBuffer<bf16> shared_h;  // [max_tokens in whole blocks, Is]
  DeviceBuffer<bf16> slots;     // [max_tokens, K, H]
  DeviceBuffer<std::int32_t> counters[plan::kNumCounterKinds];
  // The plan.
  DeviceBuffer<plan::RankPass> pass;
  DeviceBuffer<std::int32_t> block_row_begin, block_row_count, block_expert, expert_block_begin, chunk_begin;
};

// Maps of the weights that a rank bound last: [E_l], then the shared expert's. Weights stay where they are from step to
// step, so the maps do too.
class BoundWeights {
 public:
  explicit BoundWeights(std::int64_t num_experts) : maps_(num_experts + 1) {}

  const WeightMaps* maps() const { return maps_.data(); }

  void bind(const LayerShape& shape, const std::vector<ExpertWeights>& experts, const ExpertWeights& shared,
            cudaStream_t stream) {
    std::vector<ExpertWeights> all = experts;
    all.push_back(shared);
    const auto are_equal = [](const ExpertWeights& a, const ExpertWeights& b) {
      return a.w1 == b.w1 && a.w3 == b.w3 && a.w2 == b.w2;
    };
    if (std::equal(all.begin(), all.end(), bound_.begin(), bound_.end(), are_equal)) return;
    std::vector<WeightMaps> maps;
    for (const ExpertWeights& expert : experts) maps.push_back(make_maps(expert, shape.hidden, shape.intermediate));
    maps.push_back(make_maps(shared, shape.hidden, shape.shared_intermediate));
    maps_.upload(maps.data(), static_cast<std::int64_t>(maps.size()), stream);
    bound_ = std::move(all);
  }

 private:
  static WeightMaps make_maps(const ExpertWeights& weights, std::int64_t hidden, std::int64_t width) {
    return {make_matrix_map(weights.w1, {width, hidden, hidden}, kHalfColumns),
            make_matrix_map(weights.w3, {width, hidden, hidden}, kHalfColumns),
            make_matrix_map(weights.w2, {hidden, width, width}, kHalfColumns)};
  }

  DeviceBuffer<WeightMaps> maps_;
  std::vector<ExpertWeights> bound_;
};

class Sm90Engine : public Engine {
 public:
  Sm90Engine(const LayerShape& shape, std::shared_ptr<Group> group, const WorkspaceOptions& options)
      : Engine(shape, std::move(group)),
        shape_(Engine::shape()),
        options_(resolve_options(shape_, own_group().size(), options, limits(shape_, options))),
        schedule_shape_(plan::make_schedule_shape(shape_, own_group().size())),
        ring_(plan::make_ring(kBlockRows, options_.ring_rows, options_.chunk_rows)),
        blocks_(std::max(kClusterBlocks, options_.blocks / kClusterBlocks * kClusterBlocks)),
        weights_(schedule_shape_.experts_per_rank()) {
    if (own_group().size() != 1) {
      throw Error(ErrorCode::kUnsupported, "group: the sm90 engine runs one rank in this version");
    }
    if (schedule_shared_bytes(schedule_shape_) > kMaxScheduleSharedBytes) {
      throw Error(ErrorCode::kUnsupported, "num_experts: " + std::to_string(shape_.num_experts) +
                                               " are too many for one rank of the sm90 engine; use more ranks");
    }
    allocate();
  }

  ~Sm90Engine() override { cudaDeviceSynchronize(); }

  std::int64_t ring_rows() const override { return std::int64_t{ring_.ring_blocks} * ring_.block_rows; }
  std::int64_t saved_rows() const override { return options_.saved_rows; }
  std::int64_t schedule_words() const override { return schedule_shape_.words(); }
  bool is_dead() const override {
    look_at_device();
    return death_.has_come();
  }
  void check() const override {
    look_at_device();
    death_.check();
  }
  const std::vector<WaitReport>& wait_reports() const override {
    look_at_device();
    return death_.reports();
  }

  void build_schedule(const std::vector<ExpertIds>& ids, const std::vector<std::int32_t*>& schedules,
                      Stream stream) override {
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    if (options_.poison) fill_with_nan(schedules[0], schedule_words(), cuda_stream);
    ScheduleParams params{};
    params.shape = schedule_shape_;
    params.own_ids = {ids[0].topk_idx, nullptr, static_cast<std::int32_t>(ids[0].tokens), ids[0].is_int64 ? 1 : 0};
    params.own_schedule = schedules[0];
    params.num_local_ranks = 1;
    params.histogram = histogram_.data();
    launch_schedule(params, stream);
    require(cudaGetLastError(), "launching the schedule");
  }

  void forward(const std::vector<ForwardInputs>& ranks, Stream stream) override {
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    const ForwardInputs& inputs = ranks[0];
    const plan::PassShape pass = pass_shape(are_rows_saved(ranks, options_));
    if (options_.poison) poison(inputs, cuda_stream);
    weights_.bind(shape_, inputs.experts, inputs.shared, cuda_stream);
    launch_plan(plan_params(pass, inputs), stream);
    require(cudaGetLastError(), "launching the plan");
    if (options_.timeline != nullptr) recorder_.begin(blocks_, cuda_stream);
    launch_forward(forward_params(pass, inputs), blocks_, stream);
    if (options_.timeline != nullptr) recorder_.end(plan::Pass::kForward, cuda_stream, *options_.timeline);
  }

  void backward(const std::vector<BackwardInputs>&, GradientMode, Stream) override {
    throw Error(ErrorCode::kUnsupported, "backward: the sm90 engine runs forward passes only in this version");
  }

 private:
  void allocate() {
    const plan::ScheduleShape& schedule = schedule_shape_;
    const PlanSizes sizes = plan_sizes(schedule, ring_, 1);
    memory_.h = DeviceBuffer<bf16>(ring_rows() * shape_.intermediate);
    memory_.shared_h = DeviceBuffer<bf16>(sizes.token_blocks * kBlockRows * shape_.shared_intermediate);
    memory_.slots = DeviceBuffer<bf16>(shape_.max_tokens * shape_.topk * shape_.hidden);
    const auto counters = [&](plan::CounterKind kind, std::int64_t count) {
      memory_.counters[static_cast<int>(kind)] = DeviceBuffer<std::int32_t>(count);
    };
    counters(plan::CounterKind::kUp, sizes.blocks);
    counters(plan::CounterKind::kDown, sizes.blocks);
    counters(plan::CounterKind::kSharedUp, sizes.token_blocks);
    counters(plan::CounterKind::kRemoteWork, 1);
    memory_.pass = DeviceBuffer<plan::RankPass>(1);
    memory_.block_row_begin = DeviceBuffer<std::int32_t>(sizes.blocks);
    memory_.block_row_count = DeviceBuffer<std::int32_t>(sizes.blocks);
    memory_.block_expert = DeviceBuffer<std::int32_t>(sizes.blocks);
    memory_.expert_block_begin = DeviceBuffer<std::int32_t>(schedule.experts_per_rank() + 1);
    memory_.chunk_begin = DeviceBuffer<std::int32_t>(sizes.chunks + 1);
    segments_ = DeviceBuffer<plan::Segment>(sizes.segments);
    queue_ = DeviceBuffer<plan::Queue>(1);
    next_tickets_ = DeviceBuffer<std::int32_t>(3);  // and the clusters' progress
    phase_segments_ = DeviceBuffer<std::int64_t>(sizes.phases);
    phase_tickets_ = DeviceBuffer<std::int64_t>(sizes.phases);
    histogram_ = DeviceBuffer<std::int32_t>(std::int64_t{kScheduleTiles} * (schedule.num_experts + 1));
    slots_of_rank_ = DeviceBuffer<bf16*>(1);
    leaves_ = DeviceBuffer<std::int32_t>(1);
    bf16* slots = memory_.slots.data();
    slots_of_rank_.upload(&slots, 1, nullptr);
    require(cudaDeviceSynchronize(), "preparing device memory");
  }

  plan::PassShape pass_shape(bool has_saved_rows) const {
    plan::PassShape result;
    result.pass = plan::Pass::kForward;
    result.ring = ring_;
    result.saved_rows = has_saved_rows ? options_.saved_rows : 0;
    result.has_shared = shape_.shared_intermediate > 0;
    result.keep_x = options_.keep_x;
    result.pull_pieces = 0;
    result.tiles = make_tile_counts(shape_);
    return result;
  }

  PlanParams plan_params(const plan::PassShape& pass, const ForwardInputs& inputs) const {
    PlanParams params{};
    PlanRank& rank = params.own_rank;
    rank.schedule = plan::view_schedule(schedule_shape_, inputs.schedule);
    rank.pass = memory_.pass.data();
    rank.block_row_begin = memory_.block_row_begin.data();
    rank.block_row_count = memory_.block_row_count.data();
    rank.block_expert = memory_.block_expert.data();
    rank.expert_block_begin = memory_.expert_block_begin.data();
    rank.chunk_begin = memory_.chunk_begin.data();
    for (int kind = 0; kind < plan::kNumCounterKinds; ++kind) rank.counters[kind] = memory_.counters[kind].data();
    params.num_ranks = 1;
    params.num_experts = schedule_shape_.experts_per_rank();
    params.max_chunks = static_cast<std::int32_t>(memory_.chunk_begin.count());
    params.shape = pass;
    params.segments = segments_.data();
    params.math = queue_.data();
    params.next_tickets = next_tickets_.data();
    params.progress = next_tickets_.data() + 2;
    params.phase_segments = phase_segments_.data();
    params.phase_tickets = phase_tickets_.data();
    return params;
  }

  ForwardParams<1> forward_params(const plan::PassShape& pass, const ForwardInputs& inputs) const {
    ForwardParams<1> params{};
    params.local_ranks[0] = forward_rank(inputs);
    params.shape = pass;
    params.num_local_ranks = 1;
    params.num_ranks = 1;
    params.hidden = shape_.hidden;
    params.intermediate = shape_.intermediate;
    params.shared_intermediate = shape_.shared_intermediate;
    params.num_experts = schedule_shape_.experts_per_rank();
    params.topk = shape_.topk;
    params.activation = shape_.activation;
    params.math = queue_.data();
    params.next_ticket = next_tickets_.data();
    params.progress = next_tickets_.data() + 2;
    params.slots_of_rank = slots_of_rank_.data();
    params.watch = {static_cast<std::int64_t>(options_.timeout_s * 1e9), leaves_.data(), report_.device()};
    params.timeline = recorder_.device_timeline();
    return params;
  }

  ForwardRank forward_rank(const ForwardInputs& inputs) const {
    ForwardRank rank{};
    const std::int64_t width = shape_.intermediate;
    const std::int64_t shared_width = shape_.shared_intermediate;
    rank.h_load = make_matrix_map(memory_.h.data(), {ring_rows(), width, width}, kBlockRows / 2);
    rank.h_store = make_matrix_map(memory_.h.data(), {ring_rows(), width, width}, kBoxRows);
    if (shared_width > 0) {
      const MatrixShape all{memory_.shared_h.count() / shared_width, shared_width, shared_width};
      rank.shared_h_load = make_matrix_map(memory_.shared_h.data(), all, kBlockRows / 2);
      rank.shared_h_store = make_matrix_map(memory_.shared_h.data(), all, kBoxRows);
    }
    bf16* gate_up = inputs.saved.gate_up;
    if (gate_up != nullptr) {
      rank.gate_store = make_matrix_map(gate_up, {options_.saved_rows, width, 2 * width}, kBoxRows);
      rank.up_store = make_matrix_map(gate_up + width, {options_.saved_rows, width, 2 * width}, kBoxRows);
    }
    bf16* shared_gate_up = inputs.saved.shared_gate_up;
    if (shared_gate_up != nullptr) {
      const MatrixShape half{shape_.max_tokens, shared_width, 2 * shared_width};
      rank.shared_gate_store = make_matrix_map(shared_gate_up, half, kBoxRows);
      rank.shared_up_store = make_matrix_map(shared_gate_up + shared_width, half, kBoxRows);
    }
    rank.slots = make_slot_map(memory_.slots.data(), shape_.max_tokens, shape_.topk, shape_.hidden);
    rank.schedule = plan::view_schedule(schedule_shape_, inputs.schedule);
    rank.pass = memory_.pass.data();
    rank.x = inputs.x;
    rank.topk_weights = inputs.topk_weights;
    rank.gate_up = gate_up;
    rank.shared_gate_up = shared_gate_up;
    rank.out = inputs.out;
    for (int kind = 0; kind < plan::kNumCounterKinds; ++kind) rank.counters[kind] = memory_.counters[kind].data();
    rank.weights = weights_.maps();
    return rank;
  }

  // What the device has reported since the last look becomes this workspace's death.
  void look_at_device() const {
    const volatile GivenUp& report = report_.host();
    if (report.is_set == 0 || death_.has_come()) return;
    WaitReport wait;
    wait.rank = report.rank;
    wait.waited_for = report.waited_for;
    wait.pass = report.pass == static_cast<int>(plan::Pass::kForward) ? "forward" : "backward";
    wait.task = to_string(static_cast<plan::TaskKind>(report.task));
    wait.condition = report.is_flag != 0 ? to_string(static_cast<plan::FlagKind>(report.what)) : "tasks of its own";
    death_.record(Error(ErrorCode::kTimeout, to_string(wait)), {wait});
  }

  static void fill_with_nan(void* memory, std::int64_t words, cudaStream_t stream) {
    if (memory == nullptr) return;
    require(cudaMemsetAsync(memory, 0xff, static_cast<std::size_t>(words) * 4, stream), "poisoning");
  }

  // For tests: it waits for the device.
  void poison(const ForwardInputs& inputs, cudaStream_t stream) {
    memory_.h.fill(0xff, stream);
    memory_.shared_h.fill(0xff, stream);
    memory_.slots.fill(0xff, stream);
    std::int32_t tokens = 0;
    const plan::ConstSchedule schedule = plan::view_schedule(schedule_shape_, inputs.schedule);
    require(cudaMemcpyAsync(&tokens, schedule.tokens, sizeof(tokens), cudaMemcpyDeviceToHost, stream), "poisoning");
    require(cudaStreamSynchronize(stream), "poisoning");
    fill_with_nan(inputs.out, tokens * shape_.hidden / 2, stream);
    fill_with_nan(inputs.saved.gate_up, options_.saved_rows * shape_.intermediate, stream);
    fill_with_nan(inputs.saved.shared_gate_up, tokens * shape_.shared_intermediate, stream);
  }

  const LayerShape& shape_;
  WorkspaceOptions options_;
  plan::ScheduleShape schedule_shape_;
  plan::RingShape ring_;
  int blocks_;
  RankMemory memory_;
  BoundWeights weights_;
  DeviceBuffer<plan::Segment> segments_;
  DeviceBuffer<plan::Queue> queue_;
  DeviceBuffer<std::int32_t> next_tickets_;
  DeviceBuffer<std::int64_t> phase_segments_, phase_tickets_;
  DeviceBuffer<std::int32_t> histogram_;
  DeviceBuffer<bf16*> slots_of_rank_;
  DeviceBuffer<std::int32_t> leaves_;
  MappedObject<GivenUp> report_;
  TimelineRecorder recorder_;
  mutable Death death_;
};

std::unique_ptr<Engine> make_engine(const LayerShape& shape, std::shared_ptr<Group> group,
                                    const WorkspaceOptions& options) {
  if (!has_hopper()) {
    throw Error(ErrorCode::kUnsupported, "engine: sm90 needs an NVIDIA H100 or H200 as the current CUDA device");
  }
  return std::make_unique<Sm90Engine>(shape, std::move(group), options);
}

std::size_t symmetric_bytes(const LayerShape&, int) { return 0; }

std::int64_t min_ring_rows() { return plan::min_ring_rows(kBlockRows); }

}  // namespace

const EngineType kEngineType = {make_engine, symmetric_bytes, min_ring_rows, has_hopper};

}  // namespace clowder::sm90

#include "engine/sm90/timeline_recorder.h"

#include <algorithm>

namespace clowder::sm90 {
namespace {

constexpr std::int32_t kEventsOfBlock = 8192;
constexpr int kClocksOfBlock = 4;

// A block's cycles as nanoseconds of the device's clock, by the two moments at which it read both.
class BlockClock {
 public:
  explicit BlockClock(const std::int64_t* clocks) : clocks_(clocks) {}
  std::int64_t nanoseconds(std::int64_t cycles) const {
    const auto ran = static_cast<double>(clocks_[2] - clocks_[0]);
    const auto ran_cycles = static_cast<double>(std::max<std::int64_t>(1, clocks_[3] - clocks_[1]));
    return clocks_[0] + static_cast<std::int64_t>(static_cast<double>(cycles - clocks_[1]) * ran / ran_cycles);
  }

 private:
  const std::int64_t* clocks_;
};

}  // namespace

void TimelineRecorder::begin(int blocks, cudaStream_t stream) {
  if (blocks_ != blocks) {
    events_ = DeviceBuffer<TileEvent>(std::int64_t{blocks} * kEventsOfBlock);
    clocks_ = DeviceBuffer<std::int64_t>(std::int64_t{blocks} * kClocksOfBlock);
    blocks_ = blocks;
    device_ = {events_.data(), clocks_.data(), kEventsOfBlock};
  }
  events_.fill(0, stream);
}

void TimelineRecorder::end(plan::Pass pass, cudaStream_t stream, Timeline& timeline) {
  std::vector<TileEvent> events(static_cast<std::size_t>(events_.count()));
  std::vector<std::int64_t> clocks(static_cast<std::size_t>(clocks_.count()));
  require(cudaMemcpyAsync(events.data(), events_.data(), events_.bytes(), cudaMemcpyDeviceToHost, stream), "tracing");
  require(cudaMemcpyAsync(clocks.data(), clocks_.data(), clocks_.bytes(), cudaMemcpyDeviceToHost, stream), "tracing");
  require(cudaStreamSynchronize(stream), "tracing");
  TimelinePass& record = timeline.begin_pass(pass);
  record.begin_ns = clocks[0];
  record.end_ns = clocks[2];
  for (int block = 0; block < blocks_; ++block) {
    const std::int64_t* own = clocks.data() + block * kClocksOfBlock;
    record.begin_ns = std::min(record.begin_ns, own[0]);
    record.end_ns = std::max(record.end_ns, own[2]);
    add_lane(record, block, events.data() + std::int64_t{block} * kEventsOfBlock, own);
  }
}

void TimelineRecorder::add_lane(TimelinePass& pass, int block, const TileEvent* events,
                                const std::int64_t* clocks) const {
  const TileEvent* end = std::find_if(events, events + kEventsOfBlock, [](const TileEvent& e) { return e.ends == 0; });
  TimelineLane& lane = pass.add_lane(WorkerKind::kMathWorker, block, 2 * (end - events));
  const BlockClock clock(clocks);
  for (const TileEvent* event = events; event != end; ++event) {
    const auto task = static_cast<plan::TaskKind>(event->kind);
    const std::int64_t starts = std::max(event->starts, event->loaded);
    const Role role = task == plan::TaskKind::kOut ? Role::kReduce : Role::kMath;
    lane.add({clock.nanoseconds(event->waits), clock.nanoseconds(starts), event->rank, event->block, event->tile, task,
              Role::kWait, WaitCause::kMath});
    lane.add({clock.nanoseconds(starts), clock.nanoseconds(event->ends), event->rank, event->block, event->tile, task,
              role, WaitCause::kNone});
  }
}

}  // namespace clowder::sm90

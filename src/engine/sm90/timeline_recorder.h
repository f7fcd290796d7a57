// Brings what the blocks of a pass have recorded into a timeline.
#pragma once

#include <vector>

#include "engine/sm90/cuda_support.h"
#include "engine/sm90/timeline.h"
#include "observe/timeline.h"

namespace clowder::sm90 {

class TimelineRecorder {
 public:
  // No memory, and kernels record nothing, before the first begin().
  void begin(int blocks, cudaStream_t stream);
  const DeviceTimeline& device_timeline() const { return device_; }
  // Waits for the pass. Its math workers are the first math warps of the blocks: when they waited for tasks or loads,
  // when they multiplied, and when they summed slots. Stores hide behind products.
  void end(plan::Pass pass, cudaStream_t stream, Timeline& timeline);

 private:
  void add_lane(TimelinePass& pass, int block, const TileEvent* events, const std::int64_t* clocks) const;

  DeviceTimeline device_;
  DeviceBuffer<TileEvent> events_;
  DeviceBuffer<std::int64_t> clocks_;
  int blocks_ = 0;
};

}  // namespace clowder::sm90

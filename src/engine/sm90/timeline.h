// When a block did what: written by one math warp of each block, if the host has given memory for it.
#pragma once

#include <cstdint>

namespace clowder::sm90 {

// Clock cycles of the block's multiprocessor.
struct TileEvent {
  std::int64_t waits;   // the warp looks for its next task
  std::int64_t starts;  // it has one, and nothing left to store first
  std::int64_t loaded;  // the first stage is full
  std::int64_t ends;    // the last step has ended
  std::int32_t kind;    // plan::TaskKind
  std::int32_t rank;
  std::int32_t block;
  std::int32_t tile;
};

struct DeviceTimeline {
  TileEvent* events = nullptr;  // [blocks][capacity], zero at first, or null
  // Of each block: nanoseconds and cycles when it begins, and again when it ends.
  std::int64_t* clocks = nullptr;  // [blocks][4]
  std::int32_t capacity = 0;
};

}  // namespace clowder::sm90

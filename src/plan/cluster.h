// How a cluster of two GPU blocks takes the tasks of a segment. Two row blocks of one expert share a weight tile; where
// a segment has an odd number of row blocks, the last one goes alone and takes two neighbouring tiles at a time, which
// share its rows.
#pragma once

#include <cstdint>

#include "model/host_device.h"

namespace clowder::plan {

struct ClusterTask {
  std::int32_t block;  // of the segment: `block` and `block + 1`, or `block` alone
  std::int32_t tile;   // `tile`, or `tile` and `tile + 1`; the latter may be one beyond the last
  bool is_odd;         // one row block, two tiles
};

CLOWDER_HD inline std::int32_t num_cluster_tasks(std::int32_t num_blocks, std::int32_t num_tiles) {
  return num_blocks / 2 * num_tiles + num_blocks % 2 * ((num_tiles + 1) / 2);
}

// Tasks run tile by tile, so that neighbours share weights; the odd row block comes with every even tile.
CLOWDER_HD inline ClusterTask find_cluster_task(std::int32_t num_blocks, std::int32_t num_tiles, std::int32_t index) {
  const std::int32_t pairs = num_blocks / 2;
  const std::int32_t odd = num_blocks % 2;
  const std::int32_t two_tiles = 2 * pairs + odd;
  const std::int32_t tile = 2 * (index / two_tiles);
  const std::int32_t rest = index % two_tiles;
  if (rest < pairs) return {2 * rest, tile, false};
  if (odd == 1 && rest == pairs) return {2 * pairs, tile, true};
  return {2 * (rest - pairs - odd), tile + 1, false};
}

}  // namespace clowder::plan

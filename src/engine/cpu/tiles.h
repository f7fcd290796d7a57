// Tile widths of the CPU engine and the tile counts that follow. They depend on H, I and Is alone, so that no result
// can depend on anything else. On a CPU no width changes a bit except kHiddenTile: dw is summed tile by tile.
#pragma once

#include <algorithm>
#include <cstdint>

#include "clowder/types.h"
#include "engine/cpu/kernels.h"
#include "plan/pass.h"

namespace clowder::cpu {

inline constexpr int kBlockRows = kLanes;

// Wide enough that packing a row block, once a tile, costs a few per cent of the tile's products.
inline constexpr int kHiddenTile = 128;  // columns of h
inline constexpr int kOutputTile = 256;  // columns of out or dx
// A tile of weight gradients; a strip of kLanes columns of it stays in the first-level cache.
inline constexpr int kWeightTile = 128;
// Rows that weight gradients take up at once, where row blocks lie one after the other in the ring.
inline constexpr int kWeightRun = 128;

struct Range {
  int begin;
  int size;
};

inline int num_tiles(std::int64_t width, int tile) { return plan::ceil_div(width, tile); }

inline Range tile_range(int index, int tile, std::int64_t width) {
  const int begin = index * tile;
  return {begin, static_cast<int>(std::min<std::int64_t>(tile, width - begin))};
}

// Tiles of a gradient matrix [rows, columns], row tiles outermost.
inline int num_weight_tiles(std::int64_t rows, std::int64_t columns) {
  return num_tiles(rows, kWeightTile) * num_tiles(columns, kWeightTile);
}

inline plan::TileCounts make_tile_counts(const LayerShape& shape) {
  const std::int64_t shared = shape.shared_intermediate;
  plan::TileCounts tiles;
  tiles.up = num_tiles(shape.intermediate, kHiddenTile);
  tiles.down = num_tiles(shape.hidden, kOutputTile);
  tiles.hidden = tiles.up;
  tiles.input = tiles.down;
  tiles.weight13 = 2 * num_weight_tiles(shape.intermediate, shape.hidden);
  tiles.weight2 = num_weight_tiles(shape.hidden, shape.intermediate);
  tiles.shared_up = num_tiles(shared, kHiddenTile);
  tiles.shared_hidden = tiles.shared_up;
  tiles.shared_weight13 = 2 * num_weight_tiles(shared, shape.hidden);
  tiles.shared_weight2 = num_weight_tiles(shape.hidden, shared);
  tiles.out = shared > 0 ? tiles.down : 1;
  tiles.input_sum = tiles.out;
  return tiles;
}

}  // namespace clowder::cpu

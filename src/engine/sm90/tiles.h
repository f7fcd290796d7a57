// Sizes of the Hopper kernels, each with its reason. They depend on nothing that a user sets, so no result does.
#pragma once

#include <cstdint>

namespace clowder::sm90 {

// One tile of a GEMM: kBlockRows rows of activations times kTileColumns weight rows, kStepTerms terms at a time.
// 128 x 256 with two math warpgroups, in clusters of two that share one operand, needs half of the L2 reads of
// 128 x 128 (measured: docs/performance-log.md).
inline constexpr int kBlockRows = 128;
inline constexpr int kTileColumns = 256;
inline constexpr int kHalfColumns = kTileColumns / 2;  // gate and up share a tile: half of it each
inline constexpr int kStepTerms = 64;                  // 128 bytes of bf16: one swizzle row
inline constexpr int kClusterBlocks = 2;

// Four stages with small staging beat three with large by 1 to 3 per cent.
inline constexpr int kStages = 4;
inline constexpr int kRowBytes = kStepTerms * 2;
inline constexpr int kABytes = kBlockRows * kRowBytes;
inline constexpr int kHalfBBytes = kHalfColumns * kRowBytes;
inline constexpr int kStageBytes = kABytes + 2 * kHalfBBytes;

// Warps. The first warpgroup loads, schedules and copies; the other two do the arithmetic, 64 rows each.
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kMathWarpgroups = 2;
inline constexpr int kMathWarps = 4 * kMathWarpgroups;
inline constexpr int kThreads = (1 + kMathWarpgroups) * kWarpgroupThreads;
inline constexpr int kLoadWarp = 0;
inline constexpr int kFeedWarp = 1;
inline constexpr int kFirstAgentWarp = 2;  // gather (one rank) or copy agents (with peers)
inline constexpr int kAgentWarps = 2;
inline constexpr int kAgentThreads = 32 * kAgentWarps;

// 384 threads start with 168 registers each. A math thread holds 128 accumulators and 64 packed results of the tile
// before; 2 * 128 * 216 + 128 * 72 fills the register file.
inline constexpr int kMathRegisters = 224;
inline constexpr int kOtherRegisters = 56;

// A math warp stores boxes of 16 rows by 64 columns: 2 KB in the layout of the 128-byte swizzle.
inline constexpr int kBoxRows = 16;
inline constexpr int kBoxColumns = 64;
inline constexpr int kBoxBytes = kBoxRows * kBoxColumns * 2;

// Task records in flight: the one whose results are being stored, the one being computed, and the next.
inline constexpr int kRecords = 3;

// A tile's results are stored in slices behind the first steps of the next tile, if that has as many.
inline constexpr int kSlices = 8;
// Steps after the last slice at which its stores have long ended, so that waiting for them costs nothing.
inline constexpr int kSignalStep = kSlices + 3;

// Tiles of so many steps are paced: no cluster runs more than kPaceLead strides ahead of the average (pace.cuh). With
// 112 steps it saves a third of the reads of weights from memory, with 32 none.
inline constexpr int kPacedSteps = 64;
inline constexpr int kPaceStride = 8;
inline constexpr int kPaceLookAhead = 3;  // steps before the end of a stride at which the others' progress is read
inline constexpr int kPaceLead = 1;
inline constexpr int kPacePolls = 6;

// A pull moves 16 rows at a time: a first row block is complete after few link times, and one signal serves 16 rows.
inline constexpr int kPullRows = 16;
inline constexpr int kPullPieces = kBlockRows / kPullRows;

}  // namespace clowder::sm90

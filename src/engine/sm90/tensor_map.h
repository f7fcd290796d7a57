// Tensor maps of row-major bf16 matrices: how bulk copies find their boxes. Boxes are 64 columns wide and stand in
// shared memory in the 128-byte swizzle. What lies outside the matrix reads as zero and is not written.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "clowder/types.h"

namespace clowder::sm90 {

struct MatrixShape {
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t row_stride;  // in elements, a multiple of 8
};

// A null pointer or an empty matrix gives a map that nobody may use.
CUtensorMap make_matrix_map(const bf16* data, const MatrixShape& shape, int box_rows);

// [tokens, topk, columns]: boxes of 128 tokens, one slot.
CUtensorMap make_slot_map(const bf16* data, std::int64_t tokens, std::int32_t topk, std::int64_t columns);

}  // namespace clowder::sm90

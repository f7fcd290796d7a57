// How far a tensor is from its reference: as a whole and in its parts, because a norm over everything hides a wrong
// tile.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "clowder/types.h"

namespace clowder::check {

inline constexpr std::int64_t kColumnBlock = 16;

// A matrix [groups * rows_per_group, columns]; groups are experts where there are several.
struct TensorShape {
  std::int64_t groups = 1;
  std::int64_t rows_per_group = 0;
  std::int64_t columns = 0;

  std::int64_t rows() const { return groups * rows_per_group; }
  std::int64_t elements() const { return rows() * columns; }
};

// Each relative error is ||a - ref|| / ||ref|| over its part: 0 when both are all zero, infinite when only the
// reference is, and infinite when the part of `a` holds a NaN or an infinity. An error below 2^-120 counts as none.
struct Comparison {
  double rel = 0.0;
  double rel_worst_column_block = 0.0;  // over blocks of kColumnBlock columns
  double rel_worst_row = 0.0;
  double rel_worst_expert = 0.0;
  // The error of a row, relative to the larger of its norm and the root mean square over its group's rows that are not
  // zero. A row of few elements may be small by chance, and says little by itself.
  double worst_row_error = 0.0;
};

Comparison compare(std::span<const float> actual, std::span<const double> reference, const TensorShape& shape);

// 64 bits of a hash of the values' bits, as 16 hexadecimal digits. Not for adversaries.
std::string digest(std::span<const bf16> values);
std::string digest(std::span<const float> values);

}  // namespace clowder::check

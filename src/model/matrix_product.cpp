#include "model/matrix_product.h"

#include <algorithm>
#include <vector>

#include "model/bf16.h"
#include "model/parallel.h"

namespace clowder {
namespace {

// A tile of sums that fits the sixteen registers of two doubles that every x86-64 machine has.
constexpr std::int64_t kTileRows = 4;
constexpr std::int64_t kTileColumns = 4;
// Inner indices whose panels stay in the first-level cache.
constexpr std::int64_t kInnerBlock = 256;
// Column tiles that share one walk over the panels of a; their own panels (64 KB) stay in the second-level cache.
constexpr std::int64_t kGroupTiles = 8;
constexpr std::int64_t kGroupColumns = kGroupTiles * kTileColumns;
constexpr std::int64_t kRowPanel = kTileRows * kInnerBlock;
// Below this many multiplications, starting threads costs more than it saves.
constexpr std::int64_t kWorthThreads = 1 << 19;

using Pair = double __attribute__((vector_size(16)));

double to_double(double value) { return value; }
double to_double(bf16 value) { return static_cast<double>(to_float(value)); }

// panel[k][lane] = element (first_lane + lane, first_k + k) for kWidth lanes, 0 beyond `lanes`.
template <std::int64_t kWidth, class T>
void pack(const MatrixView<T>& matrix, std::int64_t first_lane, std::int64_t lanes, std::int64_t first_k,
          std::int64_t count, double* panel) {
  for (std::int64_t lane = 0; lane < kWidth; ++lane) {
    const T* source = matrix.data + (first_lane + lane) * matrix.row_stride + first_k * matrix.column_stride;
    const bool inside = first_lane + lane < lanes;
    for (std::int64_t k = 0; k < count; ++k) {
      panel[k * kWidth + lane] = inside ? to_double(source[k * matrix.column_stride]) : 0.0;
    }
  }
}

void multiply_tile(const double* a_panel, const double* b_panel, std::int64_t count, double* tile) {
  Pair sums[kTileRows][kTileColumns / 2] = {};
  for (std::int64_t k = 0; k < count; ++k) {
    const double* b = b_panel + k * kTileColumns;
    const Pair b0 = {b[0], b[1]};
    const Pair b1 = {b[2], b[3]};
    for (std::int64_t i = 0; i < kTileRows; ++i) {
      const double a = a_panel[k * kTileRows + i];
      sums[i][0] += Pair{a, a} * b0;
      sums[i][1] += Pair{a, a} * b1;
    }
  }
  for (std::int64_t i = 0; i < kTileRows; ++i) {
    for (std::int64_t j = 0; j < kTileColumns; ++j) tile[i * kTileColumns + j] = sums[i][j / 2][j % 2];
  }
}

// c's tile += tile, as far as it lies inside c.
void add_tile(const ProductShape& shape, std::int64_t first_row, std::int64_t first_column, const double* tile,
              double* c) {
  const std::int64_t rows = std::min(kTileRows, shape.rows - first_row);
  const std::int64_t columns = std::min(kTileColumns, shape.columns - first_column);
  for (std::int64_t row = 0; row < rows; ++row) {
    double* target = c + (first_row + row) * shape.columns + first_column;
    for (std::int64_t column = 0; column < columns; ++column) target[column] += tile[row * kTileColumns + column];
  }
}

template <class T>
void multiply_add_any(const ProductShape& shape, const MatrixView<double>& a, const MatrixView<T>& b, double* c,
                      int threads) {
  const std::int64_t row_tiles = (shape.rows + kTileRows - 1) / kTileRows;
  const std::int64_t groups = (shape.columns + kGroupColumns - 1) / kGroupColumns;
  if (shape.rows * shape.columns * shape.inner < kWorthThreads) threads = 1;

  const MatrixView<T> columns_of_b = b.transposed();
  std::vector<double> a_panels(static_cast<std::size_t>(row_tiles * kRowPanel));
  for (std::int64_t first_k = 0; first_k < shape.inner; first_k += kInnerBlock) {
    const std::int64_t count = std::min(kInnerBlock, shape.inner - first_k);
    parallel_for(row_tiles, threads, [&](std::int64_t i) {
      pack<kTileRows>(a, i * kTileRows, shape.rows, first_k, count, &a_panels[i * kRowPanel]);
    });
    parallel_for(groups, threads, [&](std::int64_t group) {
      double b_panels[kGroupColumns * kInnerBlock];
      const std::int64_t first_column = group * kGroupColumns;
      const std::int64_t columns = std::min(kGroupColumns, shape.columns - first_column);
      for (std::int64_t j = 0; j < columns; j += kTileColumns) {
        pack<kTileColumns>(columns_of_b, first_column + j, shape.columns, first_k, count, b_panels + j * kInnerBlock);
      }
      double tile[kTileRows * kTileColumns];
      for (std::int64_t i = 0; i < row_tiles; ++i) {
        for (std::int64_t j = 0; j < columns; j += kTileColumns) {
          multiply_tile(&a_panels[i * kRowPanel], b_panels + j * kInnerBlock, count, tile);
          add_tile(shape, i * kTileRows, first_column + j, tile, c);
        }
      }
    });
  }
}

}  // namespace

void multiply_add(const ProductShape& shape, const MatrixView<double>& a, const MatrixView<double>& b, double* c,
                  int threads) {
  multiply_add_any(shape, a, b, c, threads);
}

void multiply_add(const ProductShape& shape, const MatrixView<double>& a, const MatrixView<bf16>& b, double* c,
                  int threads) {
  multiply_add_any(shape, a, b, c, threads);
}

}  // namespace clowder

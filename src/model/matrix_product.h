// Products of fp64 matrices for the reference: each element is one chain of additions in the order of the inner index,
// whatever the number of threads.
#pragma once

#include <cstdint>

#include "clowder/types.h"

namespace clowder {

// Element (i, j) stands at data[i * row_stride + j * column_stride].
template <class T>
struct MatrixView {
  const T* data;
  std::int64_t row_stride;
  std::int64_t column_stride;

  MatrixView transposed() const { return {data, column_stride, row_stride}; }
};

template <class T>
MatrixView<T> row_major(const T* data, std::int64_t columns) {
  return {data, columns, 1};
}

struct ProductShape {
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t inner;
};

// c [rows, columns] += a [rows, inner] b [inner, columns]; c is row-major and contiguous.
void multiply_add(const ProductShape& shape, const MatrixView<double>& a, const MatrixView<double>& b, double* c,
                  int threads);
void multiply_add(const ProductShape& shape, const MatrixView<double>& a, const MatrixView<bf16>& b, double* c,
                  int threads);

}  // namespace clowder

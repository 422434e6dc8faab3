// Up to 8 rows of x, packed for the kernels that read a matrix once for all of them.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "quantized_matmul/cpu_support.h"

namespace mlx_anvil {

// Rows of a matrix that are worth waking a thread for.
int64_t gemv_grain(const QuantizedMatrixView& matrix);

// Filled up to a power of two of rows with zeros.
class GemvOperand {
 public:
  // `from`: [given_rows][matrix.columns] in matrix.dtype.
  GemvOperand(const QuantizedMatrixView& matrix, const void* from, int64_t given_rows);

  int64_t rows() const { return rows_; }

  // [rows()][count] for rows [first, first + count) of the matrix, which may be another one of the
  // same format.
  Floats multiply(const QuantizedMatrixView& matrix, int64_t first, int64_t count) const;

 private:
  GemvOperand(const QuantizedMatrixView& matrix,
              const void* from,
              int64_t given_rows,
              bool integers);

  void pack_floats(const QuantizedMatrixView& matrix, const void* from, int64_t given_rows);
  void pack_integers(const QuantizedMatrixView& matrix, const void* from, int64_t given_rows);

  // Row m of x, which was read from `from` to `count` numbers at `row`.
  void divide_if_large(
      const QuantizedMatrixView& matrix, const void* from, int64_t m, float* row, int64_t count);

  bool integers_;
  int64_t rows_;
  Floats x_, sums_;
  std::vector<int64_t> large_;  // rows that are divided by kLargeNumber
  // Rows that have no integers, by themselves.
  std::vector<std::pair<int64_t, std::unique_ptr<GemvOperand>>> not_finite_;
};

}  // namespace mlx_anvil

// Up to 8 rows of x, packed for the GEMV kernels, which read a matrix once for all rows.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "quantized_matmul/cpu_support.h"

namespace mlx_anvil {

// Minimum rows of a matrix per thread.
int64_t gemv_grain(const QuantizedMatrixView& matrix);

// Zero rows pad the operand to a power of two.
class GemvOperand {
 public:
  // `from` is [given_rows][matrix.columns] in matrix.dtype.
  GemvOperand(const QuantizedMatrixView& matrix, const void* from, int64_t given_rows);

  int64_t rows() const { return rows_; }

  // Returns [rows()][count] for rows [first, first + count) of `matrix`. It may differ from the
  // constructor's matrix, but must have the same format.
  Floats multiply(const QuantizedMatrixView& matrix, int64_t first, int64_t count) const;

 private:
  GemvOperand(const QuantizedMatrixView& matrix,
              const void* from,
              int64_t given_rows,
              bool integers);

  void pack_floats(const QuantizedMatrixView& matrix, const void* from, int64_t given_rows);
  void pack_integers(const QuantizedMatrixView& matrix, const void* from, int64_t given_rows);

  // Divides row m of x, converted from `from` to `count` floats at `row`, if it is large.
  void divide_if_large(
      const QuantizedMatrixView& matrix, const void* from, int64_t m, float* row, int64_t count);

  bool integers_;
  int64_t rows_;
  Floats x_, sums_;
  std::vector<int64_t> large_;  // rows divided by kLargeNumber
  // Rows without an integer representation, as float32 operands.
  std::vector<std::pair<int64_t, std::unique_ptr<GemvOperand>>> not_finite_;
};

}  // namespace mlx_anvil

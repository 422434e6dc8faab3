// Shared helpers of cpu*.cpp.
#pragma once

#include <vector>

#include "gather_matmul/cpu_pieces.h"
#include "gather_matmul/problem.h"
#include "quantized_matmul/cpu_support.h"

namespace mlx_anvil {

// A product of quantized experts, or the gated product of two.
struct GatherCall {
  KernelDtype dtype;
  QuantizedFormat format;
  QuantizedProduct product;
  const GatherSizes& sizes;
  const GatherRows& rows;
  QuantizedWeights weights[2];
  const void* biases[2];  // of the experts; may be null
  bool gated;
  GateOptions options;
  const void* x;
  void* out;

  bool transposed() const { return product == QuantizedProduct::kTransposed; }
  int64_t x_columns() const { return transposed() ? sizes.columns : sizes.outputs; }
  int64_t out_columns() const { return transposed() ? sizes.outputs : sizes.columns; }
  int64_t x_bytes() const { return x_columns() * element_size(dtype); }
  int64_t out_bytes() const { return out_columns() * element_size(dtype); }
  int matrices() const { return gated ? 2 : 1; }

  QuantizedMatrixView matrix(int which, int64_t expert) const;
  void* out_row(const GatherPiece& piece, int64_t row) const {
    return at(out, rows.rows[piece.begin + row].out * out_bytes());
  }

  // Adds the expert's bias to columns [first, first + count) of rows, [rows][count].
  void add_bias(
      int which, int64_t expert, int64_t first, int64_t count, int64_t rows, float* to) const;
};

inline Floats bytes(int64_t count) {
  return floats(ceil_div(count, static_cast<int64_t>(sizeof(float))));
}

// Pieces of up to kQuantizedGemvRows rows, x W^T.
void multiply_few_rows(const GatherCall& call, const std::vector<GatherPiece>& pieces);

// Pieces of up to kMostGatherRows rows, by GEMM.
inline constexpr int64_t kMostGatherRows = 512;
void multiply_many_rows(const GatherCall& call, const std::vector<GatherPiece>& pieces);

// Columns [first, first + count) of the piece from products of all columns: gates them, or copies
// them where they do not lie in the result already.
void finish_columns(const GatherCall& call,
                    const GatherPiece& piece,
                    int64_t first,
                    int64_t count,
                    const void* product,
                    const void* up);

// One piece by the kernels of quantized_matmul, which take any numbers.
void multiply_alone(const GatherCall& call, const GatherPiece& piece);

}  // namespace mlx_anvil

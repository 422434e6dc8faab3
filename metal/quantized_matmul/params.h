// Parameters of the quantized matmul kernels, shared by the host (C++) and the kernels (MSL).
//
// All arrays are dense: x [batch, rows, K or N], w [batch, N, K * bits / 32] in 32-bit words,
// scales and biases [batch, N, K / group], out [batch, rows, N or K].
#pragma once

#ifndef __METAL__
#include <cstdint>
namespace mlx_anvil {
#endif

struct QuantizedParams {
  int32_t rows;         // rows of x and out per batch
  int32_t columns;      // K: codes per row of w
  int32_t outputs;      // N: rows of w
  int32_t group_shift;  // log2 of the group size

  int32_t rows_per_part;  // split plain product: rows of w that one part sums
  int32_t whole_tiles;    // gemv_matrix.metal: full tiles; the remaining ones are half as high

  int32_t activation;  // swiglu: of the gate, as in metal/common/activation_kind.h
  float limit;         // swiglu: of gate and up; 0: none
};

// For gemm_matrix.metal.
struct QuantizedGemmParams {
  int32_t rows;  // as in QuantizedParams
  int32_t columns;
  int32_t outputs;
  int32_t group_shift;

  int32_t parts;           // that the columns are split into
  int32_t steps_per_part;  // of GemmTile::kColumns columns
  int32_t factor_bytes;    // that one copy of scales or biases has: 4, 8 or 16
  int32_t unused;
};

struct QuantizedSumParams {
  int64_t size;  // elements per part
  int32_t parts;
  int32_t unused;
};

// A block of weights: rows from first_row on, numbered over all batches, and columns from
// first_column on.
struct QuantizedBlockParams {
  int64_t first_row;
  int32_t first_column;
  int32_t columns;  // K: codes per row of w
  int32_t group_shift;
  int32_t block_rows;
  int32_t block_columns;
  int32_t unused;
};

static_assert(sizeof(QuantizedParams) == 4 * 8, "same layout in C++ and MSL");
static_assert(sizeof(QuantizedGemmParams) == 4 * 8, "same layout in C++ and MSL");
static_assert(sizeof(QuantizedSumParams) == 8 + 4 * 2, "same layout in C++ and MSL");
static_assert(sizeof(QuantizedBlockParams) == 8 + 4 * 6, "same layout in C++ and MSL");

#ifndef __METAL__
}  // namespace mlx_anvil
#endif

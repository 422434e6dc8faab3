// Parameters of the kernels of quantized matrices, shared by the host (C++) and the kernels (MSL).
//
// All arrays are dense: x [batch, rows, K or N], w [batch, N, K * bits / 32] in 32-bit words,
// scales and biases [batch, N, K / group], out [batch, rows, N or K].
#pragma once

#ifndef __METAL__
#include <cstdint>
namespace mlx_anvil {
#endif

struct QuantizedParams {
  int32_t rows;         // of x and out, for each matrix
  int32_t columns;      // K: codes in a row of w
  int32_t outputs;      // N: rows of w
  int32_t group_shift;  // log2 of the codes that share a scale

  int32_t rows_per_part;  // of a plain product in parts: rows of w that each part sums
  int32_t whole_tiles;  // of gemv_matrix.metal: tiles of all their rows of w; the others have half
};

struct QuantizedSumParams {
  int64_t size;  // elements of a part
  int32_t parts;
  int32_t unused;
};

static_assert(sizeof(QuantizedParams) == 4 * 6, "same layout in C++ and MSL");
static_assert(sizeof(QuantizedSumParams) == 8 + 4 * 2, "same layout in C++ and MSL");

#ifndef __METAL__
}  // namespace mlx_anvil
#endif

// The CPU kernels of dense gathered products.
#pragma once

#include "common/isa.h"
#include "gather_matmul/problem.h"

namespace mlx_anvil {

// Some columns of the product of gathered rows with one dense matrix.
struct GatherDenseTile {
  KernelDtype dtype;
  bool transposed;  // w is [columns, depth], else [depth, columns]
  const void* w;    // of one expert
  int64_t depth;
  int64_t columns;       // of the result
  int64_t first, count;  // columns of the tile
  // Rows of x and of the result, as byte pointers. x is packed as `packed` says, if there is one.
  int64_t rows;
  const void* const* x;
  void* const* out;
  float* scratch;  // scratch() floats
};

// out += sum over rows r of y[r]^T x[r], for rows [first, first + count) of out.
struct GatherOuterTile {
  KernelDtype dtype;
  int64_t rows;
  const void* const* y;  // of `outputs` elements
  const void* const* x;  // of `columns` elements
  int64_t outputs, columns;
  int64_t first, count;
  void* out;       // [outputs, columns]
  float* scratch;  // outer_scratch() floats
};

struct GatherDenseKernels {
  int64_t (*scratch)(const GatherDenseTile&);
  void (*multiply)(const GatherDenseTile&);
  int64_t (*outer_scratch)(const GatherOuterTile&);
  void (*outer)(const GatherOuterTile&);
};

MLX_ANVIL_DECLARE_KERNELS(GatherDenseKernels, gather_dense_kernels)

}  // namespace mlx_anvil

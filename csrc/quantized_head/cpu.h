// Finds the best logits on the CPU. Uses the calling thread and those of `parallel_for`, and
// returns when the result is complete.
#pragma once

#include "quantized_matmul/simd/kernels.h"

namespace mlx_anvil {

struct QuantizedHeadArgs {
  QuantizedMatrixView matrix;  // matrix.dtype is also that of x and values
  int64_t rows;                // rows of x
  int64_t kept;                // 1 to matrix.outputs
  const void* x;               // [rows, matrix.columns]
  uint32_t* indices;           // [rows, kept], best first
  void* values;                // [rows, kept]
};

void quantized_head_cpu(const QuantizedHeadArgs& args);

}  // namespace mlx_anvil

// The best logits on the CPU: runs on the calling thread and those of `parallel_for`, until done.
#pragma once

#include "quantized_matmul/simd/kernels.h"

namespace mlx_anvil {

struct QuantizedHeadArgs {
  QuantizedMatrixView matrix;  // matrix.dtype: of x and values too
  int64_t rows;                // of x
  int64_t kept;                // 1 to matrix.outputs
  const void* x;               // [rows, matrix.columns]
  uint32_t* indices;           // [rows, kept], best first
  void* values;                // likewise
};

void quantized_head_cpu(const QuantizedHeadArgs& args);

}  // namespace mlx_anvil

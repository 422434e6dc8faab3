// Dequantises rows of a quantized matrix: out[i] = W[id[i]]. quantized_matmul/problem.h describes
// the formats.
#pragma once

#include "common/isa.h"
#include "quantized_matmul/simd/kernels.h"

namespace mlx_anvil {

struct QuantizedEmbeddingKernels {
  // Dequantises one row of the matrix to `out`, in `dtype`. `scratch` has scratch() floats.
  void (*row)(
      const QuantizedMatrixView& matrix, int64_t row, KernelDtype dtype, void* out, float* scratch);
  int64_t (*scratch)(const QuantizedMatrixView& matrix);
};

MLX_ANVIL_DECLARE_KERNELS(QuantizedEmbeddingKernels, quantized_embedding_kernels)

}  // namespace mlx_anvil

// quantized_embedding on the CPU. Uses the calling thread and those of `parallel_for`, and returns
// when the result is complete.
#pragma once

#include "quantized_matmul/simd/kernels.h"

namespace mlx_anvil {

// Row ids of any 32- or 64-bit integer type. Negative ids count from the end; ids still out of
// range clamp to the first or last row.
struct RowIds {
  const void* data;
  int64_t count;
  bool is_long;  // 64 bits
  bool is_signed;

  int64_t row(int64_t index, int64_t rows) const;
};

struct QuantizedEmbeddingArgs {
  RowIds ids;
  QuantizedMatrixView matrix;  // `outputs` is its number of rows
  KernelDtype dtype;           // of out
  void* out;                   // [ids.count, columns]
};

// Gradients in scales and biases (affine): sums over the places of each row's id.
struct EmbeddingScaleGradientArgs {
  RowIds ids;
  KernelDtype dtype;  // of dy and the gradients
  QuantizedFormat format;
  int64_t columns, rows;  // of the table
  const uint32_t* w;
  const void* dy;  // [ids.count, columns]
  void* d_scales;  // [rows, columns / group]
  void* d_biases;
};

void quantized_embedding_cpu(const QuantizedEmbeddingArgs& args);
void embedding_scale_gradient_cpu(const EmbeddingScaleGradientArgs& args);

}  // namespace mlx_anvil

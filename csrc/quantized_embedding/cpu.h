// quantized_embedding on the CPU: runs on the calling thread and those of `parallel_for`, until
// done.
#pragma once

#include "quantized_matmul/simd/kernels.h"

namespace mlx_anvil {

// Row numbers in any integer format of 32 or 64 bits. Negative ones count from the end; what is
// still outside is the row next to it.
struct RowIds {
  const void* data;
  int64_t count;
  bool is_long;  // 64 bits
  bool is_signed;

  int64_t row(int64_t index, int64_t rows) const;
};

struct QuantizedEmbeddingArgs {
  RowIds ids;
  QuantizedMatrixView matrix;  // `outputs` is the number of its rows
  KernelDtype dtype;           // of out
  void* out;                   // [ids.count, columns]
};

void quantized_embedding_cpu(const QuantizedEmbeddingArgs& args);

}  // namespace mlx_anvil

// The ops on the CPU. They use the calling thread and those of `parallel_for`, and return when the
// result is complete.
#pragma once

#include "gguf_matmul/problem.h"
#include "quantized_embedding/cpu.h"

namespace mlx_anvil {

struct GgufRowsArgs {
  RowIds ids;
  GgufKind kind;
  KernelDtype dtype;  // of out
  int64_t rows, columns;
  const uint8_t* w;
  void* out;  // [ids.count, columns]
};

void gguf_matmul_cpu(const GgufMatmulArgs& args);
void gguf_swiglu_cpu(const GgufSwigluArgs& args);
void gguf_rows_cpu(const GgufRowsArgs& args);

}  // namespace mlx_anvil

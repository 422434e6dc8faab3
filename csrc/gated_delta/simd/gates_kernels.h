// Arguments of gated_delta_gates' CPU kernels. Plain data (see common/isa.h).
#pragma once

#include "common/dtype.h"
#include "common/isa.h"

namespace mlx_anvil {

// Everything is dense.
struct DeltaGatesArgs {
  const void* a;                // [rows, heads, channels]
  const void* b;                // [rows, heads]
  const void *a_log, *dt_bias;  // [heads], [heads, channels]; float32, or of the dtype of a
  bool log_is_float32, bias_is_float32;
  float* g;
  float* beta;
  int64_t rows, heads, channels;
  bool is_bounded;
  float lower_bound, rate_scale;
};

// Computes rows [begin, end). `scratch`: two rows of g, each of whole vectors.
using DeltaGatesKernels = void (*)(const DeltaGatesArgs& args,
                                   int64_t begin,
                                   int64_t end,
                                   float* scratch);

MLX_ANVIL_DECLARE_KERNELS(PerDtype<DeltaGatesKernels>, gated_delta_gates_kernels)

}  // namespace mlx_anvil

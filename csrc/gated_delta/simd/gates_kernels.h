// Arguments of gated_delta_gates' CPU kernels, filled by gates_primitive.cpp. Plain data (see
// common/isa.h).
#pragma once

#include "common/dtype.h"
#include "common/integers.h"
#include "common/isa.h"

namespace mlx_anvil {

// Everything is dense.
struct DeltaGatesArgs {
  KernelDtype dtype;            // of a and b
  const void* a;                // [rows, heads, channels]
  const void* b;                // [rows, heads]
  const void *a_log, *dt_bias;  // [heads], [heads, channels]; float32, or of the dtype
  bool log_is_float32, bias_is_float32;
  int64_t rows, heads, channels;
  bool is_bounded;
  float lower_bound, rate_scale;

  [[gnu::always_inline]] int64_t columns() const { return heads * channels; }
  // Numbers of a row of whole vectors, in scratch memory.
  [[gnu::always_inline]] int64_t row_size() const { return round_up(columns(), 16); }
};

struct DeltaGatesForwardArgs : DeltaGatesArgs {
  float *g, *beta;
};

struct DeltaGatesBackwardArgs : DeltaGatesArgs {
  const float *d_g, *d_beta;
  void *d_a, *d_b;
};

// Computes rows [begin, end). `scratch`: two rows.
using DeltaGatesForwardKernel = void (*)(const DeltaGatesForwardArgs& args,
                                         int64_t begin,
                                         int64_t end,
                                         float* scratch);

// The same. Adds to the gradients of dt_bias and of each column's A_log in `sums`, two rows; null:
// not wanted.
using DeltaGatesBackwardKernel = void (*)(
    const DeltaGatesBackwardArgs& args, int64_t begin, int64_t end, float* scratch, float* sums);

MLX_ANVIL_DECLARE_KERNELS(PerDtype<DeltaGatesForwardKernel>, gated_delta_gates_forward_kernels)
MLX_ANVIL_DECLARE_KERNELS(PerDtype<DeltaGatesBackwardKernel>, gated_delta_gates_backward_kernels)

}  // namespace mlx_anvil

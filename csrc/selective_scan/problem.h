// The problem as plain data, for CPU kernels too (common/isa.h).
//
// For each batch, channel c and step t, with states n:
//   d[t, c]    = softplus(dt[t, c]) or dt[t, c]
//   h[t, c, n] = exp(d[t, c] A[c, n]) h[t - 1, c, n] + d[t, c] x[t, c] B[t, n]
//   s[t, c]    = sum over n of h[t, c, n] C[t, n] + D[c] x[t, c]
//   y[t, c]    = s[t, c] silu(z[t, c])
#pragma once

#include "common/dtype.h"

namespace mlx_anvil {

struct ScanSizes {
  int64_t batch, steps, channels, states;
};

// Rows of a batch and a step, whose elements are adjacent. Strides in elements. `data` is null if
// the call lacks the array.
struct ScanRows {
  const void* data = nullptr;
  int64_t batch_stride = 0, step_stride = 0;
};

struct ScanArgs {
  KernelDtype dtype;  // of the rows
  ScanSizes sizes;
  ScanRows x, dt, b, c, z;
  const float* a;          // [channels, states]
  const float* d;          // [channels], or null
  const float* state;      // [batch, channels, states], or null: zeros
  const int32_t* lengths;  // [batch], or null
  bool softplus;

  [[gnu::always_inline]] int64_t length_of(int64_t index) const {
    if (!lengths) {
      return sizes.steps;
    }
    const int64_t length = lengths[index];
    return length < 0 ? 0 : length < sizes.steps ? length : sizes.steps;
  }
};

}  // namespace mlx_anvil

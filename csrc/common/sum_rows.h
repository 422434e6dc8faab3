// Sums on the CPU whose error does not grow with the number of terms. The order of additions
// depends only on the shape.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace mlx_anvil {

// Compensated addition: sums += x. `lost` holds the rounding error of the sums so far.
void add_compensated(const float* x, int64_t count, float* sums, float* lost);

struct RowSum {
  int64_t outer, rows, inner;  // dense [outer, rows, inner] -> [outer, inner]
  const void* in;
  void* out;
  KernelDtype in_dtype, out_dtype;
};

void sum_rows(const RowSum& sum);

}  // namespace mlx_anvil

// Sums on the CPU whose error does not grow with the number of terms. The order of additions
// depends on the shape only.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace mlx_anvil {

// Floats after compensation: sums += x, where `lost` has what they have rounded away so far.
void add_compensated(const float* x, int64_t count, float* sums, float* lost);

struct RowSum {
  int64_t outer, rows, inner;  // dense [outer, rows, inner] -> [outer, inner]
  const void* in;
  void* out;
  KernelDtype in_dtype, out_dtype;
};

void sum_rows(const RowSum& sum);

}  // namespace mlx_anvil

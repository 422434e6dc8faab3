// CPU kernels for sums over rows, used by sum_rows.cpp.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace mlx_anvil {

struct SumKernels {
  // Adds rows, `step` elements apart, to compensated sums. `lost` holds each sum's rounding error
  // so far. `sums` and `lost` must have room for whole vectors.
  void (*add_rows)(
      const void* from, int64_t rows, int64_t step, int64_t columns, float* sums, float* lost);
  void (*store)(const float* from, int64_t count, void* to);
};

MLX_ANVIL_DECLARE_KERNELS(PerDtype<SumKernels>, sum_kernels)

}  // namespace mlx_anvil

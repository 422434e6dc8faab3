// Sums over rows on the CPU: what kernel files give sum_rows.cpp.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace mlx_anvil {

struct SumKernels {
  // Adds rows, `step` elements apart, to compensated sums: what a sum has rounded away so far is in
  // `lost`. Both have room for whole vectors.
  void (*add_rows)(
      const void* from, int64_t rows, int64_t step, int64_t columns, float* sums, float* lost);
  void (*store)(const float* from, int64_t count, void* to);
};

MLX_ANVIL_DECLARE_KERNELS(PerDtype<SumKernels>, sum_kernels)

}  // namespace mlx_anvil

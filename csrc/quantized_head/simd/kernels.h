// Filters the logits of a block of rows of w while they are in cache.
#pragma once

#include "common/isa.h"
#include "quantized_matmul/problem.h"

namespace mlx_anvil {

struct QuantizedHeadKernels {
  // Rounds the logits to `dtype` in place. Writes the positions of those not at or below `bar`, NaN
  // included (all of them if `bar` is NaN), and returns their number.
  int64_t (*above)(KernelDtype dtype, float* logits, int64_t count, float bar, int32_t* positions);
};

MLX_ANVIL_DECLARE_KERNELS(QuantizedHeadKernels, quantized_head_kernels)

}  // namespace mlx_anvil

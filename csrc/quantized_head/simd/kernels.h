// What the CPU does to the logits of a block of rows of w, while they are in the cache.
#pragma once

#include "common/isa.h"
#include "quantized_matmul/problem.h"

namespace mlx_anvil {

struct QuantizedHeadKernels {
  // Rounds the logits to `dtype`, in place, and lists those that are not at or below `bar`, of
  // which NaN is one (all of them, where `bar` is NaN). Gives their number.
  int64_t (*above)(KernelDtype dtype, float* logits, int64_t count, float bar, int32_t* positions);
};

MLX_ANVIL_DECLARE_KERNELS(QuantizedHeadKernels, quantized_head_kernels)

}  // namespace mlx_anvil

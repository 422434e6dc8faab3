// Interface of the CPU kernels that join partial results. Plain data: kernel files include this
// header (common/isa.h says why they include no other kind).
#pragma once

#include "common/dtype.h"
#include "common/isa.h"
#include "flash_attention/simd/kernels.h"

namespace mlx_anvil {

struct RingKernels {
  // Joins the partial results of a block's rows, as ForwardKernels::forward stores them, with the
  // rows of out, which is float32, and lse:
  //
  //   lse' = log(exp(lse) + exp(lse of the part))
  //   out' = exp(lse - lse') out + exp(lse of the part - lse') (out of the part)
  void (*join)(const AttentionForwardArgs& args, const AttentionRows& rows, const float* partials);

  // to += from
  void (*add)(float* to, const float* from, int64_t count);

  // Stores dense float32 rows as rows of `to`.
  void (*store)(const float* from, int64_t rows, int64_t columns, void* to, int64_t row_stride);
};

MLX_ANVIL_DECLARE_KERNELS(PerDtype<RingKernels>, ring_kernels)

}  // namespace mlx_anvil

#include "flash_attention/gpu.h"

#include "common/errors.h"

namespace mlx_anvil {

void attention_forward_gpu(const AttentionConfig&,
                           const AttentionSizes&,
                           const AttentionForwardArrays&,
                           const mx::Stream&) {
  throw_internal_error("flash_attention", "no Metal kernels yet.");
}

void attention_backward_gpu(const AttentionConfig&,
                            const AttentionSizes&,
                            const AttentionBackwardArrays&,
                            const mx::Stream&) {
  throw_internal_error("flash_attention", "no Metal kernels yet.");
}

}  // namespace mlx_anvil

// mla_decode on GPUs and in the simulator, called by the primitive.
#pragma once

#include "flash_attention/problem.h"
#include "mla_decode/mla_decode.h"

namespace mlx_anvil {

// `in` has mask and sinks broadcast, and no sequences. The outputs are allocated; `lse` is null if
// it is not wanted.
void mla_decode_gpu(const AttentionConfig& config,
                    const MlaInputs& in,
                    mx::array& out,
                    mx::array* lse,
                    const mx::Stream& stream);

}  // namespace mlx_anvil

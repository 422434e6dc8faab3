// The gradients of a forward from what it saved, for plain and for dequantized keys and values.
#pragma once

#include "common/primitive.h"
#include "flash_attention/problem.h"

namespace mlx_anvil {

// `primals`: q, k, v, mask and sinks, without those that the call lacks; `saved`: its out and lse;
// `cotangents`: of out, and of lse if that was a result. Returns the gradients of `argnums`.
Arrays attention_gradient(const AttentionConfig& config,
                          const Arrays& primals,
                          const Arrays& saved,
                          const Arrays& cotangents,
                          const std::vector<int>& argnums,
                          mx::Stream s);

}  // namespace mlx_anvil

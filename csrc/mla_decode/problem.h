// The problem as plain data: attention of one kv head (flash_attention/problem.h) whose keys have
// two parts.
//
//   s[i, j] = cap(scale * (q_nope[i] . latent[j] + q_rope[i] . k_rope[j])) + mask[i, j]
//   out[i]  = sum over visible j of exp(s[i, j] - lse[i]) latent[j]
#pragma once

#include "flash_attention/problem.h"

namespace mlx_anvil {

// The largest sizes with kernels.
inline constexpr int kMaxMlaRank = kMaxGpuDecodeHeadDim;
inline constexpr int kMaxMlaRopeDim = 64;

// In the base, q is q_nope, and k and v are the latent. Its head_dim is 0: the kernels pack queries
// and keys themselves.
struct MlaArgs : AttentionForwardArgs {
  AttentionView q_rope, k_rope;
  int64_t rope_dim = 0;
};

}  // namespace mlx_anvil

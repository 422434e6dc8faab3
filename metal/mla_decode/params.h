// Parameters of mla_decode's kernels, shared by the host (C++) and the kernels (MSL).
#pragma once

#include "metal/flash_attention/params.h"

#ifndef __METAL__
namespace mlx_anvil {
#endif

// In `forward`, q is q_nope, and k and v are the latent. Strides as there.
struct MlaParams {
  AttentionForwardParams forward;
  int64_t q_rope_strides[4];
  int64_t k_rope_strides[4];
  int64_t rope_dim;
};

static_assert(sizeof(MlaParams) == sizeof(AttentionForwardParams) + 8 * 9,
              "same layout in C++ and MSL");

#ifndef __METAL__
}  // namespace mlx_anvil
#endif

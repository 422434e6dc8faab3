// gated_delta and ssd_scan by chunks: the kernels of chunk_backward.h, with products of four SIMD
// groups at once (metal/common/group_product.h).
//
// Kernels: gated_delta_chunk_backward_group_bfloat16_d<key dim>, and _channels_ for a decay per
// channel.
#include "metal/common/kernel.h"
#include "metal/gated_delta/chunk_backward.h"

// ---- kernels

#ifdef __MSLC__  // Apple's GPUs never launch these
#define INSTANTIATE(dim)                                                        \
  MLX_ANVIL_KERNEL("gated_delta_chunk_backward_group_bfloat16_d" #dim,          \
                   gated_delta_chunk_backward<bfloat, true, false, true, dim>)  \
  MLX_ANVIL_KERNEL("gated_delta_chunk_backward_channels_group_bfloat16_d" #dim, \
                   gated_delta_chunk_backward<bfloat, true, true, true, dim>)

INSTANTIATE(64)
INSTANTIATE(128)
#endif

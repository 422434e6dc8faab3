// gated_delta and ssd_scan by chunks: the kernels of chunk_backward.h.
//
// Kernels: gated_delta_chunk_backward_<dtype>_d<key dim>, _channels_ for a decay per channel, and
// _pairs_ for matrix units of 16 bits.
#include "metal/common/kernel.h"
#include "metal/gated_delta/chunk_backward.h"

// ---- kernels

#define INSTANTIATE(variant, dtype, T, pairs, dim)                                  \
  MLX_ANVIL_KERNEL("gated_delta_chunk_backward_" variant #dtype "_d" #dim,          \
                   gated_delta_chunk_backward<T, pairs, false, false, dim>)         \
  MLX_ANVIL_KERNEL("gated_delta_chunk_backward_channels_" variant #dtype "_d" #dim, \
                   gated_delta_chunk_backward<T, pairs, true, false, dim>)

MLX_ANVIL_DELTA_CHUNK_KERNELS(INSTANTIATE)

// The same computation as quantized_forward.metal, for GPUs whose matrix units multiply for four
// SIMD groups at once (metal/common/group_product.h): forward_group_matrix.metal over quantized
// keys and values. Takes 16-bit types, affine codes of 4 and 8 bits in groups of at least 32, rows
// that are vectors, and no mask array.
//
// Kernels: flash_attention_quantized_forward_matrix_group_<dtype>_d<head dim>v<value head dim>.
// Grid, bindings and function constants: as for quantized_forward.metal.
// Threadgroup: 256 x 1 x 1, 16 queries per SIMD group.
// Threadgroup memory 0: two tiles of keys and two of values.
#ifdef __MSLC__  // Apple's GPUs never launch these
#include "metal/common/kernel.h"
#include "metal/flash_attention/forward_group_block.h"
#include "metal/flash_attention/quantized_group_tiles.h"
#include "metal/flash_attention/tiles.h"

template <typename T, int kHeadDim, int kValueDim, int kKeys, int kSimdgroups>
[[kernel, max_total_threads_per_threadgroup(kSimdgroups * 32)]] void
flash_attention_quantized_forward_group(const device T* q [[buffer(0)]],
                                        const device uint* k [[buffer(1)]],
                                        const device uchar* k_scales [[buffer(2)]],
                                        const device T* k_biases [[buffer(3)]],
                                        const device uint* v [[buffer(4)]],
                                        const device uchar* v_scales [[buffer(5)]],
                                        const device T* v_biases [[buffer(6)]],
                                        const device uchar* mask [[buffer(7)]],
                                        const device float* sinks [[buffer(8)]],
                                        const device int* sequences [[buffer(9)]],
                                        device T* out [[buffer(10)]],
                                        device float* lse [[buffer(11)]],
                                        constant AttentionQuantizedParams& params [[buffer(12)]],
                                        threadgroup uint4* memory [[threadgroup(0)]],
                                        uint3 group [[threadgroup_position_in_grid]],
                                        uint3 groups [[threadgroups_per_grid]],
                                        uint thread_index [[thread_index_in_threadgroup]],
                                        uint simdgroup [[simdgroup_index_in_threadgroup]],
                                        uint lane [[thread_index_in_simdgroup]]) {
  using Tiles = GroupCodeTiles<T, kHeadDim, kValueDim, kKeys, 32 * kSimdgroups>;
  constant AttentionParams& common = params.forward.common;
  const GridPlace grid = place_in_grid(group, groups);
  const BlockOfRows block = block_of_queries<16 * kSimdgroups>(sequences, common, grid, lane);
  if (!block.has_rows()) {
    return;
  }
  const RaggedLengths lengths = block.lengths;
  const int kv_head = grid.head / common.group;
  // No plain keys and values.
  const ForwardCall<T, RaggedLengths> call = {q,    nullptr,      nullptr,   mask, sinks,  out, lse,
                                              grid, thread_index, simdgroup, lane, lengths};
  Tiles tiles;
  tiles.memory = reinterpret_cast<threadgroup T*>(memory);
  tiles.thread_index = thread_index;
  tiles.all_keys = code_rows(k, k_scales, k_biases, common.k_strides, params.keys, grid.batch,
                             kv_head, lengths.keys(common), common.head_dim, lengths.first_key());
  tiles.all_values =
      code_rows(v, v_scales, v_biases, common.v_strides, params.values, grid.batch, kv_head,
                lengths.keys(common), common.v_head_dim, lengths.first_key());
  compute_group_block<kHeadDim, kValueDim, kKeys, kSimdgroups>(call, block.first, tiles,
                                                               params.forward);
}

#endif

// ---- kernels

#ifdef __MSLC__
#define INSTANTIATE_QUANTIZED_FORWARD_GROUP(dtype, type, d, dv, keys, simdgroups)            \
  MLX_ANVIL_KERNEL("flash_attention_quantized_forward_matrix_group_" #dtype "_d" #d "v" #dv, \
                   flash_attention_quantized_forward_group<type, d, dv, keys, simdgroups>)

MLX_ANVIL_ATTENTION_QUANTIZED_FORWARD_GROUP_TILES(INSTANTIATE_QUANTIZED_FORWARD_GROUP)
#endif

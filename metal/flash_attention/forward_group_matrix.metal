// The same computation as forward.metal, for GPUs whose matrix units multiply for four SIMD groups
// at once (metal/common/group_product.h). Takes 16-bit types, rows that are vectors, and no mask
// array.
//
// Kernels: flash_attention_forward_matrix_group_<dtype>_d<head dim>v<value head dim>.
// Grid, bindings and function constants: as for forward.metal.
// Threadgroup: 256 x 1 x 1, 16 queries per SIMD group.
// Threadgroup memory 0: two tiles of keys and two of values.
//
//   S = q k^T of the first tile; P = 2^(S - m)
//   for each further tile:
//     start S = q k^T; start out += P v of the tile before
//     copy the keys of the tile after it, and its values, into the free places
//     wait for S: P' = 2^(S - m')
//     wait for out: rescale it; P = P'
//   out += P v; store lse and out / sum
#ifdef __MSLC__  // Apple's GPUs never launch these
#include "metal/common/kernel.h"
#include "metal/common/resident.h"
#include "metal/flash_attention/forward_group_block.h"
#include "metal/flash_attention/tiles.h"

template <typename T, int kHeadDim, int kValueDim, int kKeys, int kSimdgroups, int kResident>
[[kernel, max_total_threads_per_threadgroup(kSimdgroups * 32)]] void flash_attention_forward_group(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* v [[buffer(2)]],
    const device uchar* mask [[buffer(3)]],
    const device float* sinks [[buffer(4)]],
    const device int* sequences [[buffer(5)]],
    device T* out [[buffer(6)]],
    device float* lse [[buffer(7)]],
    constant AttentionForwardParams& params [[buffer(8)]],
    threadgroup uint4* memory [[threadgroup(0)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Tiles = GroupTiles<T, kHeadDim, kValueDim, kKeys, 32 * kSimdgroups>;
  constant AttentionParams& common = params.common;
  keep_resident<kResident, 5>(rows_are_vectors);
  const GridPlace grid = place_in_grid(group, groups);
  const BlockOfRows block = block_of_queries<16 * kSimdgroups>(sequences, common, grid, lane);
  if (!block.has_rows()) {
    return;
  }
  const ForwardCall<T, RaggedLengths> call = {
      q, k, v, mask, sinks, out, lse, grid, thread_index, simdgroup, lane, block.lengths};
  Tiles tiles;
  tiles.memory = reinterpret_cast<threadgroup T*>(memory);
  tiles.thread_index = thread_index;
  tiles.next_keys = call.keys(common);
  tiles.next_values = call.values(common);
  compute_group_block<kHeadDim, kValueDim, kKeys, kSimdgroups>(call, block.first, tiles, params);
}

#endif

// ---- kernels

#ifdef __MSLC__
#define INSTANTIATE_FORWARD_GROUP(dtype, type, d, dv, keys, simdgroups, resident)  \
  MLX_ANVIL_KERNEL("flash_attention_forward_matrix_group_" #dtype "_d" #d "v" #dv, \
                   flash_attention_forward_group<type, d, dv, keys, simdgroups, resident>)

MLX_ANVIL_ATTENTION_FORWARD_GROUP_TILES(INSTANTIATE_FORWARD_GROUP)
#endif

// Forward of flash_attention (forward.metal) with quantized keys and values. Each tile is
// dequantised once, while it is staged in threadgroup memory; the rest is the same.
//
// Kernels: flash_attention_quantized_forward_<dtype>_d<head dim>v<value head dim>, and
// flash_attention_quantized_forward_matrix_... with tiles for matrix units.
// Grid: (blocks of queries, query heads, batch); grid.h may swap the first two.
// Threadgroup: simdgroups * 32 x 1 x 1 (tiles.h).
// Bindings: q, codes, scales and biases of k, the same of v, mask, sinks, sequences, out, lse,
// params. Function constants: scores.h (stores_lse included), ragged.h, grid.h and quantized.h.
// Alignment: rows of q and out as rows_are_vectors promises, and rows of codes start at multiples
// of eight codes. Head dims are multiples of 16, as formats demand.
#include "metal/common/kernel.h"
#include "metal/flash_attention/forward_block.h"
#include "metal/flash_attention/quantized_staging.h"
#include "metal/flash_attention/tiles.h"

template <typename T,
          int kHeadDim,
          int kValueDim,
          int kRowFragments,
          int kKeys,
          Keeping kKeeping,
          int kSimdgroups>
[[kernel, max_total_threads_per_threadgroup(kSimdgroups * 32)]] void
flash_attention_quantized_forward(const device T* q [[buffer(0)]],
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
                                  uint3 group [[threadgroup_position_in_grid]],
                                  uint3 groups [[threadgroups_per_grid]],
                                  uint thread_index [[thread_index_in_threadgroup]],
                                  uint simdgroup [[simdgroup_index_in_threadgroup]],
                                  uint lane [[thread_index_in_simdgroup]]) {
  using Passing = PassingCodes<T, kKeys, kHeadDim, kValueDim, 32 * kSimdgroups>;
  using Block =
      ForwardBlock<T, kHeadDim, kValueDim, kRowFragments, kKeys, kKeeping, kSimdgroups, Passing>;
  alignas(16) threadgroup T key_tiles[Block::kOfKeys];
  alignas(16) threadgroup T value_tiles[Block::kOfValues];
  constant AttentionParams& common = params.forward.common;
  const GridPlace grid = place_in_grid(group, groups);
  const BlockOfRows block = block_of_queries<Block::kRows>(sequences, common, grid, lane);
  if (!block.has_rows()) {
    return;
  }
  const RaggedLengths lengths = block.lengths;
  const int kv_head = grid.head / common.group;
  // No plain keys and values.
  const ForwardCall<T, RaggedLengths> call = {q,    nullptr,      nullptr,   mask, sinks,  out, lse,
                                              grid, thread_index, simdgroup, lane, lengths};
  Block::compute(call, block.first,
                 code_rows(k, k_scales, k_biases, common.k_strides, params.keys, grid.batch,
                           kv_head, lengths.keys(common), common.head_dim, lengths.first_key()),
                 code_rows(v, v_scales, v_biases, common.v_strides, params.values, grid.batch,
                           kv_head, lengths.keys(common), common.v_head_dim, lengths.first_key()),
                 params.forward, key_tiles, value_tiles, nullptr);
}

// ---- kernels

#define INSTANTIATE(name, dtype, type, d, dv, ...)                               \
  MLX_ANVIL_KERNEL("flash_attention_quantized_" name "_" #dtype "_d" #d "v" #dv, \
                   flash_attention_quantized_forward<type, d, dv, __VA_ARGS__>)
#define INSTANTIATE_QUANTIZED_FORWARD(...) INSTANTIATE("forward", __VA_ARGS__)
#define INSTANTIATE_QUANTIZED_FORWARD_MATRIX(...) INSTANTIATE("forward_matrix", __VA_ARGS__)

MLX_ANVIL_ATTENTION_QUANTIZED_FORWARD_TILES(INSTANTIATE_QUANTIZED_FORWARD)
#ifdef __MSLC__  // too large for Apple's GPUs, which would not choose them
MLX_ANVIL_ATTENTION_QUANTIZED_FORWARD_MATRIX_TILES(INSTANTIATE_QUANTIZED_FORWARD_MATRIX)
#endif

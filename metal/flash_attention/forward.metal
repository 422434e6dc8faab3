// Forward of flash_attention for more than a few queries:
//   s[i, j] = cap(scale * q[i] . k[j]) + mask[i, j],  cap(x) = softcap * tanh(x / softcap)
//   lse[i]  = log(sum over visible j of exp(s[i, j]) (+ exp(sink)))
//   out[i]  = sum over visible j of exp(s[i, j] - lse[i]) v[j]
//
// Kernels: flash_attention_<pass>_<dtype>_d<head dim>v<value head dim>, where pass is forward,
// forward_matrix, forward_matrix_long or forward_matrix_tall (tiles.h).
// Grid: (blocks of queries, query heads, batch); grid.h may swap the first two. Blocks of a
// packed batch: block_of_queries (ragged.h).
// Threadgroup: simdgroups * 32 x 1 x 1 (tiles.h).
// Bindings: q, k, v, mask, sinks, sequences, out, lse, params; long and tall: threadgroup memory 0
// for two tiles of keys, two of values and, if they are kept there, the queries. Function
// constants: scores.h (stores_lse included), ragged.h and grid.h. Alignment: rows as
// rows_are_vectors promises; otherwise none. Columns of out are contiguous.
//
//   each simdgroup: load its 8 or 16 rows of q; m = sink or -inf; sum = 0; out = 0
//   for each block of keys that any query of the threadgroup sees:
//     stage the block of keys and values in threadgroup memory
//     if the simdgroup sees any of it:
//       S = cap(q k^T) with mask and band; rescale by the new maximum
//       P = 2^(S - m); sum += rowsum(P); out += P v
//   sum = rowsum over lanes + 2^(sink - m)
//   store lse = ln 2 (m + log2(sum)) and out / sum
#include "metal/common/kernel.h"
#include "metal/flash_attention/forward_block.h"
#include "metal/flash_attention/staging.h"
#include "metal/flash_attention/tiles.h"

template <typename T,
          int kHeadDim,
          int kValueDim,
          int kRowFragments,
          int kKeys,
          Keeping kKeeping,
          int kSimdgroups,
          Staging kStaging>
[[kernel, max_total_threads_per_threadgroup(kSimdgroups * 32)]] void flash_attention_forward(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* v [[buffer(2)]],
    const device uchar* mask [[buffer(3)]],
    const device float* sinks [[buffer(4)]],
    const device int* sequences [[buffer(5)]],
    device T* out [[buffer(6)]],
    device float* lse [[buffer(7)]],
    constant AttentionForwardParams& params [[buffer(8)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Passing = PassingRows<T, kKeys, kHeadDim, kValueDim, 32 * kSimdgroups, kStaging>;
  using Block =
      ForwardBlock<T, kHeadDim, kValueDim, kRowFragments, kKeys, kKeeping, kSimdgroups, Passing>;
  alignas(16) threadgroup T key_tiles[Block::kOfKeys];
  alignas(16) threadgroup T value_tiles[Block::kOfValues];
  const GridPlace grid = place_in_grid(group, groups);
  const BlockOfRows block = block_of_queries<Block::kRows>(sequences, params.common, grid, lane);
  if (!block.has_rows()) {
    return;
  }
  const ForwardCall<T, RaggedLengths> call = {
      q, k, v, mask, sinks, out, lse, grid, thread_index, simdgroup, lane, block.lengths};
  Block::compute(call, block.first, call.keys(params.common), call.values(params.common), params,
                 key_tiles, value_tiles, nullptr);
}

template <typename T,
          int kHeadDim,
          int kValueDim,
          int kRowFragments,
          int kKeys,
          Keeping kKeeping,
          int kSimdgroups,
          Staging kStaging>
[[kernel, max_total_threads_per_threadgroup(kSimdgroups * 32)]] void flash_attention_forward_large(
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
  using Passing = PassingRows<T, kKeys, kHeadDim, kValueDim, 32 * kSimdgroups, kStaging>;
  using Block =
      ForwardBlock<T, kHeadDim, kValueDim, kRowFragments, kKeys, kKeeping, kSimdgroups, Passing>;
  threadgroup T* const key_tiles = reinterpret_cast<threadgroup T*>(memory);
  threadgroup T* const value_tiles = key_tiles + Block::kOfKeys;
  const GridPlace grid = place_in_grid(group, groups);
  const BlockOfRows block = block_of_queries<Block::kRows>(sequences, params.common, grid, lane);
  if (!block.has_rows()) {
    return;
  }
  const ForwardCall<T, RaggedLengths> call = {
      q, k, v, mask, sinks, out, lse, grid, thread_index, simdgroup, lane, block.lengths};
  Block::compute(call, block.first, call.keys(params.common), call.values(params.common), params,
                 key_tiles, value_tiles, value_tiles + Block::kOfValues);
}

// ---- kernels

#define INSTANTIATE(name, function, dtype, type, d, dv, ...)           \
  MLX_ANVIL_KERNEL("flash_attention_" name "_" #dtype "_d" #d "v" #dv, \
                   function<type, d, dv, __VA_ARGS__>)
#define INSTANTIATE_FORWARD(...) INSTANTIATE("forward", flash_attention_forward, __VA_ARGS__)
#define INSTANTIATE_FORWARD_MATRIX(...) \
  INSTANTIATE("forward_matrix", flash_attention_forward, __VA_ARGS__)
#define INSTANTIATE_FORWARD_LONG(...) \
  INSTANTIATE("forward_matrix_long", flash_attention_forward_large, __VA_ARGS__)
#define INSTANTIATE_FORWARD_TALL(...) \
  INSTANTIATE("forward_matrix_tall", flash_attention_forward_large, __VA_ARGS__)

MLX_ANVIL_ATTENTION_FORWARD_TILES(INSTANTIATE_FORWARD)
#ifdef __MSLC__  // too large for Apple's GPUs, which would not choose them
MLX_ANVIL_ATTENTION_FORWARD_MATRIX_TILES(INSTANTIATE_FORWARD_MATRIX)
MLX_ANVIL_ATTENTION_FORWARD_LONG_TILES(INSTANTIATE_FORWARD_LONG)
MLX_ANVIL_ATTENTION_FORWARD_TALL_TILES(INSTANTIATE_FORWARD_TALL)
#endif

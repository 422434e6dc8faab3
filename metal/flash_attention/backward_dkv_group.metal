// The same computation as backward_dkv.metal, for GPUs whose matrix units multiply for four SIMD
// groups at once (metal/common/group_product.h). Takes 16-bit types, rows that are vectors, and no
// mask array.
//
// Kernels: flash_attention_backward_dkv_matrix_group_<dtype>_d<head dim>v<value head dim>.
// Grid, bindings and function constants: as for backward_dkv.metal. Threadgroup: simdgroups * 32 x
// 1 x 1, 16 keys per SIMD group. Threadgroup memory 0: the block's keys and values, four tiles of
// queries and of cotangents, -lse and delta of two tiles.
//
//   copy this block of K and V; dK = dV = 0
//   for each query head of the group, for each tile of queries that sees any key of the block:
//     start S^T = K Q^T; start dP^T = V dO^T; copy the next tile
//     wait for S^T: P^T = 2^(S^T - lse); start dV += P^T dO
//     wait for dP^T: dS^T = P^T (dP^T - delta); start dK += dS^T Q
//   store scale dK and dV
#ifdef __MSLC__  // Apple's GPUs never launch these
#include "metal/common/kernel.h"
#include "metal/flash_attention/backward_group_keys.h"
#include "metal/flash_attention/grid.h"
#include "metal/flash_attention/tiles.h"

// Zero for padding.
struct RowsInUse {
  int count;

  METAL_FUNC float operator()(int row, int, float gradient) const thread {
    return row < count ? gradient : 0.0f;
  }
};

template <typename T, int kHeadDim, int kValueDim, int kQueries, int kSimdgroups>
[[kernel, max_total_threads_per_threadgroup(kSimdgroups * 32)]] void
flash_attention_backward_dkv_group(const device T* q [[buffer(0)]],
                                   const device T* k [[buffer(1)]],
                                   const device T* v [[buffer(2)]],
                                   const device int* sequences [[buffer(4)]],
                                   const device float* lse [[buffer(5)]],
                                   const device T* d_out [[buffer(6)]],
                                   const device float* delta [[buffer(7)]],
                                   device T* d_k [[buffer(8)]],
                                   device T* d_v [[buffer(9)]],
                                   constant AttentionBackwardParams& params [[buffer(10)]],
                                   threadgroup uint4* memory [[threadgroup(0)]],
                                   uint3 group [[threadgroup_position_in_grid]],
                                   uint3 groups [[threadgroups_per_grid]],
                                   uint thread_index [[thread_index_in_threadgroup]],
                                   uint simdgroup [[simdgroup_index_in_threadgroup]],
                                   uint lane [[thread_index_in_simdgroup]]) {
  enum { kThreads = 32 * kSimdgroups, kKeys = 16 * kSimdgroups };
  using GroupRows = KeyGroupRows<T, kHeadDim, kValueDim, kQueries, kKeys>;
  using KeyTile = SwizzledTile<T, kKeys, kHeadDim>;
  using ValueTile = SwizzledTile<T, kKeys, kValueDim>;
  using Passing = PassingQueries<T, kHeadDim, kValueDim, kQueries, kThreads>;
  constant AttentionParams& common = params.common;
  const GridPlace grid = place_in_grid(group, groups);
  const BlockOfRows of_block = block_of_rows<kKeys, true>(sequences, common, params.sequences,
                                                          grid.batch, grid.block * kKeys, lane);
  if (!of_block.has_rows()) {
    return;
  }
  const RaggedLengths lengths = of_block.lengths;
  const int block = of_block.first, key_count = lengths.keys(common);
  if (is_packed) {
    q += lengths.query_offset * common.q_strides[2];
    k += lengths.key_offset * common.k_strides[2];
    v += lengths.key_offset * common.v_strides[2];
    lse += lengths.query_offset;
    d_out += lengths.query_offset * params.d_out_strides[2];
    delta += lengths.query_offset;
    d_k += lengths.key_offset * params.d_k_strides[2];
    d_v += lengths.key_offset * params.d_v_strides[2];
  }
  const int last = metal::min(block + kKeys, key_count) - 1;

  threadgroup T* const kept_keys = reinterpret_cast<threadgroup T*>(memory);
  threadgroup T* const kept_values = kept_keys + KeyTile::kSize;
  GroupRows rows;
  rows.place = fragment_place(lane);
  rows.first = block + simdgroup * GroupRows::kRows;
  rows.band_shift = lengths.band_shift();
  const int of_four = simdgroup % 4;
  const int first_of_four = (simdgroup - of_four) * GroupRows::kRows;
  rows.keys = {kept_keys, first_of_four, of_four, rows.place};
  rows.values = {kept_values, first_of_four, of_four, rows.place};
  rows.key_gradient.zero();
  rows.value_gradient.zero();

  Passing passing;
  passing.lengths = lengths;
  passing.range = seeing_queries(common, block, last, lengths);
  if (passing.range.begin < passing.range.end && (!is_ragged || block < key_count)) {
    const Rows<T> keys = {k + grid.batch * common.k_strides[0] + grid.head * common.k_strides[1],
                          common.k_strides[2], 1, key_count, common.head_dim};
    const Rows<T> values = {v + grid.batch * common.v_strides[0] + grid.head * common.v_strides[1],
                            common.v_strides[2], 1, key_count, common.v_head_dim};
    KeyTile::template start_copies<kThreads>(kept_keys, rows_from(keys, block), thread_index);
    ValueTile::template start_copies<kThreads>(kept_values, rows_from(values, block), thread_index);

    const int head = grid.head * common.group;
    const long head_row = (static_cast<long>(grid.batch) * common.q_heads + head) * common.q_len;
    passing.q = q + grid.batch * common.q_strides[0] + head * common.q_strides[1];
    passing.d_out = d_out + grid.batch * params.d_out_strides[0] + head * params.d_out_strides[1];
    passing.own = (thread_index < kQueries ? lse : delta) + head_row;
    passing.tiles.begin(kept_values + ValueTile::kSize, thread_index);
    passing.saved = reinterpret_cast<threadgroup float*>(passing.tiles.end());
    passing.begin(params);
    const int of_head = (passing.range.end - passing.range.begin + kQueries - 1) / kQueries;
    int begin = passing.range.begin;
    for (int tile = of_head * common.group; tile > 0; --tile) {
      passing.wait();
      const bool sees_all =
          !has_band || (block >= begin + kQueries - 1 + common.band_low + rows.band_shift &&
                        block + kKeys - 1 <= begin + common.band_high + rows.band_shift);
      if (sees_all) {
        rows.template take<false>(passing, begin, params);
      } else {
        rows.template take<true>(passing, begin, params);
      }
      begin += kQueries;
      begin = begin >= passing.range.end ? passing.range.begin : begin;
    }
    rows.finish();
  }
  const int row_count = is_ragged ? lengths.row_count : common.kv_len;
  if (is_ragged) {
    rows.key_gradient.map(rows.first + rows.place.row, rows.place.column, RowsInUse{key_count});
    rows.value_gradient.map(rows.first + rows.place.row, rows.place.column, RowsInUse{key_count});
  }
  rows.key_gradient.scale(common.scale);
  rows.key_gradient.store(d_k + grid.batch * params.d_k_strides[0] +
                              grid.head * params.d_k_strides[1] +
                              rows.first * params.d_k_strides[2],
                          params.d_k_strides[2], row_count - rows.first, common.head_dim,
                          rows.place, rows_are_vectors, heads_fill_tile);
  rows.value_gradient.store(d_v + grid.batch * params.d_v_strides[0] +
                                grid.head * params.d_v_strides[1] +
                                rows.first * params.d_v_strides[2],
                            params.d_v_strides[2], row_count - rows.first, common.v_head_dim,
                            rows.place, rows_are_vectors, heads_fill_tile);
}

#endif

// ---- kernels

#ifdef __MSLC__
#define INSTANTIATE_DKV_GROUP(dtype, type, d, dv, queries, simdgroups)                  \
  MLX_ANVIL_KERNEL("flash_attention_backward_dkv_matrix_group_" #dtype "_d" #d "v" #dv, \
                   flash_attention_backward_dkv_group<type, d, dv, queries, simdgroups>)

MLX_ANVIL_ATTENTION_BACKWARD_GROUP_TILES(INSTANTIATE_DKV_GROUP)
#endif

// The same computation as backward_dq.metal, for GPUs whose matrix units multiply for four SIMD
// groups at once (metal/common/group_product.h). Takes 16-bit types, rows that are vectors, and no
// mask array.
//
// Kernels: flash_attention_backward_dq_matrix_group_<dtype>_d<head dim>v<value head dim>.
// Grid, bindings and function constants: as for backward_dq.metal; d_mask and weights are not
// written. Threadgroup: simdgroups * 32 x 1 x 1, 16 queries per SIMD group. Threadgroup memory 0:
// four tiles of keys and four of values.
//
//   keep this block of Q and dO, lse and delta in registers; dQ = 0
//   for each tile of keys that any query of the block sees:
//     start S = Q K^T; start dP = dO V^T; copy the next tile
//     wait for S: P = 2^(S - lse)
//     wait for dP: dS = P (dP - delta); start dQ += dS K
//   store scale dQ
#ifdef __MSLC__  // Apple's GPUs never launch these
#include "metal/common/kernel.h"
#include "metal/flash_attention/backward_group_queries.h"
#include "metal/flash_attention/grid.h"
#include "metal/flash_attention/tiles.h"

template <typename T, int kHeadDim, int kValueDim, int kKeys, int kSimdgroups>
[[kernel, max_total_threads_per_threadgroup(kSimdgroups * 32)]] void
flash_attention_backward_dq_group(const device T* q [[buffer(0)]],
                                  const device T* k [[buffer(1)]],
                                  const device T* v [[buffer(2)]],
                                  const device int* sequences [[buffer(4)]],
                                  const device float* lse [[buffer(5)]],
                                  const device T* d_out [[buffer(6)]],
                                  const device float* delta [[buffer(7)]],
                                  device T* d_q [[buffer(8)]],
                                  device float* d_mask [[buffer(9)]],
                                  device T* weights [[buffer(10)]],
                                  constant AttentionBackwardParams& params [[buffer(11)]],
                                  threadgroup uint4* memory [[threadgroup(0)]],
                                  uint3 group [[threadgroup_position_in_grid]],
                                  uint3 groups [[threadgroups_per_grid]],
                                  uint thread_index [[thread_index_in_threadgroup]],
                                  uint simdgroup [[simdgroup_index_in_threadgroup]],
                                  uint lane [[thread_index_in_simdgroup]]) {
  (void)d_mask;
  (void)weights;
  enum { kThreads = 32 * kSimdgroups };
  using GroupRows = QueryGroupRows<T, kHeadDim, kValueDim, kKeys>;
  enum { kRows = kSimdgroups * GroupRows::kRows };
  constant AttentionParams& common = params.common;
  const GridPlace grid = place_in_grid(group, groups);
  const int kv_head = grid.head / common.group;
  // In a causal call the last blocks take longest, so they start first.
  const BlockOfRows of_block =
      block_of_rows<kRows, false>(sequences, common, params.sequences, grid.batch,
                                  (grid.blocks - 1 - grid.block) * kRows, lane);
  if (!of_block.has_rows()) {
    return;
  }
  const RaggedLengths lengths = of_block.lengths;
  const int block = of_block.first, query_count = lengths.queries(common);
  if (is_packed) {
    q += lengths.query_offset * common.q_strides[2];
    k += lengths.key_offset * common.k_strides[2];
    v += lengths.key_offset * common.v_strides[2];
    lse += lengths.query_offset;
    d_out += lengths.query_offset * params.d_out_strides[2];
    delta += lengths.query_offset;
    d_q += lengths.query_offset * params.d_q_strides[2];
  }
  const int last = metal::min(block + kRows, query_count) - 1;
  const long head_row = (static_cast<long>(grid.batch) * common.q_heads + grid.head) * common.q_len;

  GroupRows rows;
  rows.lengths = lengths;
  rows.place = fragment_place(lane);
  rows.first = block + simdgroup * GroupRows::kRows;
  if (is_ragged && (block >= query_count || lengths.key_count == 0)) {  // padding
    rows.gradient.zero();
    rows.gradient.store(d_q + grid.batch * params.d_q_strides[0] +
                            grid.head * params.d_q_strides[1] + rows.first * params.d_q_strides[2],
                        params.d_q_strides[2], lengths.row_count - rows.first, common.head_dim,
                        rows.place, rows_are_vectors, heads_fill_tile);
    return;
  }
  rows.begin({q + grid.batch * common.q_strides[0] + grid.head * common.q_strides[1],
              common.q_strides[2], 1, query_count, common.head_dim},
             {d_out + grid.batch * params.d_out_strides[0] + grid.head * params.d_out_strides[1],
              params.d_out_strides[2], 1, query_count, common.v_head_dim},
             lse + head_row, delta + head_row, query_count);

  const KeyRange visible = visible_keys(common, block, last, lengths);
  if (visible.begin < visible.end) {
    const Rows<T> all_keys = {k + grid.batch * common.k_strides[0] + kv_head * common.k_strides[1],
                              common.k_strides[2], 1, lengths.keys(common), common.head_dim};
    const Rows<T> all_values = {
        v + grid.batch * common.v_strides[0] + kv_head * common.v_strides[1], common.v_strides[2],
        1, lengths.keys(common), common.v_head_dim};
    PassingTiles<T, kKeys, kHeadDim, kValueDim, kThreads> tiles;
    tiles.begin(reinterpret_cast<threadgroup T*>(memory), thread_index);
    Rows<T> keys = rows_from(all_keys, visible.begin);
    Rows<T> values = rows_from(all_values, visible.begin);
    tiles.copy(keys, values);
    advance<kKeys>(keys, true);
    advance<kKeys>(values, true);
    keys.rows = visible.begin + kKeys < visible.end ? keys.rows : 0;
    values.rows = visible.begin + kKeys < visible.end ? values.rows : 0;
    tiles.copy(keys, values);
    for (int begin = visible.begin; begin < visible.end; begin += kKeys) {
      tiles.wait();
      advance<kKeys>(keys, true);
      advance<kKeys>(values, true);
      keys.rows = begin + 2 * kKeys < visible.end ? keys.rows : 0;
      values.rows = begin + 2 * kKeys < visible.end ? values.rows : 0;
      if (sees_all(common, block, last, begin, begin + kKeys, lengths)) {
        rows.template take<false>(tiles, begin, keys, values, common);
      } else {
        rows.template take<true>(tiles, begin, keys, values, common);
      }
    }
    rows.finish();
  }
  rows.gradient.scale(common.scale);
  rows.gradient.store(d_q + grid.batch * params.d_q_strides[0] + grid.head * params.d_q_strides[1] +
                          rows.first * params.d_q_strides[2],
                      params.d_q_strides[2], lengths.rows(common) - rows.first, common.head_dim,
                      rows.place, rows_are_vectors, heads_fill_tile);
}

#endif

// ---- kernels

#ifdef __MSLC__
#define INSTANTIATE_DQ_GROUP(dtype, type, d, dv, keys, simdgroups)                     \
  MLX_ANVIL_KERNEL("flash_attention_backward_dq_matrix_group_" #dtype "_d" #d "v" #dv, \
                   flash_attention_backward_dq_group<type, d, dv, keys, simdgroups>)

MLX_ANVIL_ATTENTION_BACKWARD_GROUP_TILES(INSTANTIATE_DQ_GROUP)
#endif

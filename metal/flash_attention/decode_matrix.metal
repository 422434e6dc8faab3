// The same computation as decode.metal, with matrix products of 16-bit types. On GPUs with matrix
// units, eight rows then cost no more than one.
//
// Kernels: flash_attention_decode_matrix_<dtype>_d<head dim>r8.
// Grid, bindings, function constants and alignment: as for decode.metal.
// Threadgroup: 32 * simdgroups x 1 x 1. Simdgroups take blocks of keys in turn.
//
//   load q of the 8 rows; prefetch the first block of keys and values
//   for each block of keys of this simdgroup: attend (decode_matrix.h)
//   merge the simdgroups by halves through threadgroup memory
//   split:     store the partial out, maximum and sum of each row
//   otherwise: add the sink; store out / sum and lse
#ifdef __MSLC__  // Apple's GPUs never launch these
#include "metal/common/kernel.h"
#include "metal/flash_attention/decode_matrix.h"
#include "metal/flash_attention/decode_matrix_end.h"
#include "metal/flash_attention/tiles.h"

template <typename T, int kDim, int kKeys, int kSimdgroups>
[[kernel, max_total_threads_per_threadgroup(32 * kSimdgroups)]] void flash_attention_decode_matrix(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* v [[buffer(2)]],
    const device uchar* mask [[buffer(3)]],
    const device float* sinks [[buffer(4)]],
    const device int* sequences [[buffer(5)]],
    const device int* pages [[buffer(6)]],
    device T* out [[buffer(7)]],
    device float* lse [[buffer(8)]],
    constant AttentionForwardParams& params [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using GroupRows = DecodeMatrixRows<T, kDim, kKeys>;
  threadgroup DecodeShares<typename GroupRows::State, kSimdgroups> shares;

  constant AttentionParams& common = params.common;
  const int row_count = common.group * common.q_len;
  const int blocks = (row_count + GroupRows::kRows - 1) / GroupRows::kRows;
  const int batch = group.z, kv_head = group.y / blocks;
  const int first_row = group.y % blocks * GroupRows::kRows;

  const RaggedLengths lengths = lengths_of_batch(sequences, common, batch);
  const KeyRange visible = visible_keys(common, 0, lengths.queries(common) - 1, lengths);
  const KeyRange part = keys_of_part(params, visible, group.x, is_ragged ? kKeysOfLookup : 1);
  const int part_end = part.end;

  GroupRows rows;
  rows.state.place = fragment_place(lane);
  rows.state.end = part_end;
  rows.state.lengths = lengths;
  const PageTable table = pages_of_batch(pages, params, batch);
  rows.all_keys.cache = cache_rows(k, common.k_strides, table, batch, kv_head, part_end,
                                   common.head_dim, lengths.first_key());
  rows.all_values.cache = cache_rows(v, common.v_strides, table, batch, kv_head, part_end,
                                     common.v_head_dim, lengths.first_key());
  MLX_ANVIL_UNROLL
  for (int e = 0; e < 2; ++e) {
    rows.state.at[e] = decode_row(common, batch, kv_head, first_row + rows.state.place.column + e);
  }
  const DecodeRow own = decode_row(common, batch, kv_head, first_row + rows.state.place.row);
  rows.begin(q + batch * common.q_strides[0] + own.head * common.q_strides[1] +
                 own.query * common.q_strides[2],
             common);

  const int first = part.begin + int(simdgroup) * kKeys;
  if (first < part_end) {
    rows.look_up(first);
    rows.load_keys(first);
    rows.load_values(first);
    rows.look_up(first + kSimdgroups * kKeys);
  }
  for (int begin = first; begin < part_end; begin += kSimdgroups * kKeys) {
    rows.attend(begin, begin + kSimdgroups * kKeys, mask, common);
  }

  finish_decode<T, kSimdgroups>(rows.state, shares, first_row, group.x, sinks, out, lse, params,
                                simdgroup, lane);
}

#endif

// ---- kernels

#ifdef __MSLC__
#define INSTANTIATE_DECODE_MATRIX(dtype, type, d, keys, simdgroups)      \
  MLX_ANVIL_KERNEL("flash_attention_decode_matrix_" #dtype "_d" #d "r8", \
                   flash_attention_decode_matrix<type, d, keys, simdgroups>)

MLX_ANVIL_ATTENTION_DECODE_MATRIX_TILES(INSTANTIATE_DECODE_MATRIX, float16, half)
MLX_ANVIL_ATTENTION_DECODE_MATRIX_TILES(INSTANTIATE_DECODE_MATRIX, bfloat16, bfloat)
#endif

// The same computation as quantized_decode.metal, with matrix products of 16-bit types: for affine
// codes of 4 and 8 bits, in groups of 64 or 128 columns, and heads that fill the tile.
//
// Kernels: flash_attention_quantized_decode_matrix_<dtype>_d<head dim>r8; _wide_: tiles for
// keys or values of 8 bits, where they differ.
// Grid and bindings: as for quantized_decode.metal.
// Threadgroup: 32 * simdgroups x 1 x 1. Simdgroups take blocks of keys in turn.
// Function constants: scores.h; ragged.h; pages.h; decode_row.h; quantized.h; 23: groups have 128
// columns. Alignment: rows_are_vectors is true. Codes of a row are whole vectors of 8 bytes, or 16
// if they have 8 bits; scales and biases of a row have the same strides, and are one aligned
// vector.
//
//   prefetch the first block of keys and values; load q of the 8 rows, and sum its columns by spans
//   for each block of keys of this simdgroup: attend (quantized_decode_matrix.h)
//   apply what remains of scales and biases to the output
//   merge and store, as decode_matrix.metal does
#ifdef __MSLC__  // Apple's GPUs never launch these
#include "metal/common/kernel.h"
#include "metal/flash_attention/decode_matrix_end.h"
#include "metal/flash_attention/quantized_decode_matrix.h"
#include "metal/flash_attention/tiles.h"

template <typename T, int kDim, int kKeys, int kSimdgroups>
[[kernel, max_total_threads_per_threadgroup(32 * kSimdgroups)]] void
flash_attention_quantized_decode_matrix(const device T* q [[buffer(0)]],
                                        const device uint* k [[buffer(1)]],
                                        const device uchar* k_scales [[buffer(2)]],
                                        const device T* k_biases [[buffer(3)]],
                                        const device uint* v [[buffer(4)]],
                                        const device uchar* v_scales [[buffer(5)]],
                                        const device T* v_biases [[buffer(6)]],
                                        const device uchar* mask [[buffer(7)]],
                                        const device float* sinks [[buffer(8)]],
                                        const device int* sequences [[buffer(9)]],
                                        const device int* pages [[buffer(10)]],
                                        device T* out [[buffer(11)]],
                                        device float* lse [[buffer(12)]],
                                        constant AttentionQuantizedParams& params [[buffer(13)]],
                                        uint3 group [[threadgroup_position_in_grid]],
                                        uint simdgroup [[simdgroup_index_in_threadgroup]],
                                        uint lane [[thread_index_in_simdgroup]]) {
  using GroupRows = QuantizedMatrixRows<T, kDim, kKeys>;
  threadgroup DecodeShares<typename GroupRows::State, kSimdgroups> shares;

  constant AttentionParams& common = params.forward.common;
  const int row_count = common.group * common.q_len;
  const int blocks = (row_count + GroupRows::kRows - 1) / GroupRows::kRows;
  const int batch = group.z, kv_head = group.y / blocks;
  const int first_row = group.y % blocks * GroupRows::kRows;

  const RaggedLengths lengths = lengths_of_batch(sequences, common, batch);
  const KeyRange visible = visible_keys(common, 0, lengths.queries(common) - 1, lengths);
  const KeyRange part =
      keys_of_part(params.forward, visible, group.x, is_ragged ? kKeysOfLookup : 1);
  const int part_end = part.end;

  GroupRows rows;
  rows.state.place = fragment_place(lane);
  rows.state.end = part_end;
  rows.state.lengths = lengths;
  const PageTable table = pages_of_batch(pages, params.forward, batch);
  rows.all_keys = cache_codes(k, k_scales, k_biases, common.k_strides, params.keys, table, batch,
                              kv_head, part_end, common.head_dim, lengths.first_key());
  rows.own_keys = rows.all_keys.from(GroupRows::Keys::column(rows.state.place));
  rows.all_values = cache_codes(v, v_scales, v_biases, common.v_strides, params.values, table,
                                batch, kv_head, part_end, common.v_head_dim, lengths.first_key());
  rows.own_values = rows.all_values.from(GroupRows::Values::column(rows.state.place));
  const int first = part.begin + int(simdgroup) * kKeys;
  if (first < part_end) {  // loads take the last key for those past it
    rows.look_up(first);
    rows.load_keys(first);
    rows.load_values(first);
    rows.look_up(first + kSimdgroups * kKeys);
  }
  MLX_ANVIL_UNROLL
  for (int e = 0; e < 2; ++e) {
    rows.state.at[e] = decode_row(common, batch, kv_head, first_row + rows.state.place.column + e);
  }
  const DecodeRow own = decode_row(common, batch, kv_head, first_row + rows.state.place.row);
  rows.begin(q + batch * common.q_strides[0] + own.head * common.q_strides[1] +
                 own.query * common.q_strides[2],
             params.forward.parts, common);
  for (int begin = first; begin < part_end; begin += kSimdgroups * kKeys) {
    rows.attend(begin, begin + kSimdgroups * kKeys, mask, common);
  }
  rows.finish();
  finish_decode<T, kSimdgroups>(rows.state, shares, first_row, group.x, sinks, out, lse,
                                params.forward, simdgroup, lane);
}

#endif

// ---- kernels

#ifdef __MSLC__
#define INSTANTIATE_QUANTIZED_DECODE_MATRIX(pass, dtype, type, d, keys, simdgroups) \
  MLX_ANVIL_KERNEL("flash_attention_" #pass "_" #dtype "_d" #d "r8",                \
                   flash_attention_quantized_decode_matrix<type, d, keys, simdgroups>)

MLX_ANVIL_ATTENTION_QUANTIZED_DECODE_MATRIX_TILES(INSTANTIATE_QUANTIZED_DECODE_MATRIX)
MLX_ANVIL_ATTENTION_QUANTIZED_DECODE_WIDE_TILES(INSTANTIATE_QUANTIZED_DECODE_MATRIX)
#endif

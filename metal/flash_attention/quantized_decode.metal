// flash_attention for at most 8 queries (decode.metal), with quantized keys and values: they are
// read as codes, and dequantised in registers.
//
// Kernels: flash_attention_quantized_decode_<dtype>_d<head dim>r<rows>.
// Grid: (parts of the keys, kv heads * blocks of rows, batch). Threadgroup: 32 * simdgroups
// (tiles.h), which take blocks of keys in turn.
// Bindings: q, codes, scales and biases of k, the same of v, mask, sinks, sequences, out, lse,
// params. Function constants: scores.h; ragged.h; pages.h; 16: keys are in parts, as in
// decode.metal, whose combine kernel merges them; quantized.h. Alignment: rows of q and out as
// rows_are_vectors promises, and rows of codes start at multiples of what a lane loads at once.
// Head dims are multiples of 16, as formats demand.
//
//   load q of all rows, and sum its columns
//   for each block of keys of this simdgroup:
//     load codes, scale and bias of kSteps keys and values per slot
//     for each row: scores = cap(scale (q . codes) + bias sum(q)); mask and band; online softmax
//                   out += (weight scale) codes; bias of out += weight bias
//   merge the slots of the simdgroup, then the simdgroups, as decode.metal does
#include "metal/common/kernel.h"
#include "metal/flash_attention/decode_merge.h"
#include "metal/flash_attention/quantized_decode.h"
#include "metal/flash_attention/tiles.h"

template <typename T,
          int kDim,
          int kBlockRows,
          int kSteps,
          int kElements,
          int kRowGroups,
          int kSimdgroups>
[[kernel, max_total_threads_per_threadgroup(32 * kSimdgroups)]] void
flash_attention_quantized_decode(const device T* q [[buffer(0)]],
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
  using Merge = DecodeMerge<T, kDim, kBlockRows, kRowGroups, kSimdgroups>;
  enum { kRows = Merge::kRows, kShares = Merge::kShares };
  using GroupRows = QuantizedRows<T, kDim, kRows, kSteps, kElements>;
  using Lanes = typename GroupRows::Lanes;
  alignas(16) threadgroup float shares_out[kShares][kRowGroups * Merge::kAtOnce][kDim];
  threadgroup OnlineSoftmax shares[kShares][kRowGroups * kRows];

  constant AttentionParams& common = params.forward.common;
  const typename Merge::Place at =
      decode_place<kBlockRows, kRowGroups>(common, group, simdgroup, lane);
  const int batch = at.batch, kv_head = at.kv_head, first_row = at.first_row();

  GroupRows rows;
  rows.begin(lane);
  DecodeRow of_row = decode_row(common, batch, kv_head, first_row);
  MLX_ANVIL_UNROLL
  for (int r = 0; r < kRows; ++r) {
    rows.load_query(r, query_row(q, common, of_row));
    of_row = row_after(of_row, common, first_row + r + 1);
  }

  // From here on, the lane's own row and key.
  const DecodeRow own = decode_row(common, batch, kv_head, first_row + rows.lanes.row());
  const RaggedLengths lengths = lengths_of_batch(sequences, common, batch);
  const KeyRange visible = visible_keys(common, 0, lengths.queries(common) - 1, lengths);
  enum { kStride = kShares * Lanes::kKeys };
  const KeyRange part = parts_are_fixed
                            ? fixed_keys_of_part(params.forward, visible, at.part, kStride)
                            : keys_of_part(params.forward, visible, at.part);
  const int part_end = part.end;
  const int first = part.begin + at.share * Lanes::kKeys;
  const int column = rows.lanes.first_column();
  const PageTable table = pages_of_batch(pages, params.forward, batch);
  const CodeRows<T> keys =
      cache_codes(k, k_scales, k_biases, common.k_strides, params.keys, table, batch, kv_head,
                  part_end, common.head_dim, lengths.first_key())
          .from(existing_column<kElements>(column, common.head_dim));
  const CodeRows<T> values =
      cache_codes(v, v_scales, v_biases, common.v_strides, params.values, table, batch, kv_head,
                  part_end, common.v_head_dim, lengths.first_key())
          .from(existing_column<kElements>(column, common.v_head_dim));
  HeadMask<T> own_mask = mask_of<T>(mask, common, batch, own.head)
                             .from(own.query, lengths.first_key() + first + rows.lanes.key());
  for (int begin = first; begin < part_end; begin += kStride) {
    typename GroupRows::Keys key[kSteps];
    typename GroupRows::Values value[kSteps];
    MLX_ANVIL_UNROLL
    for (int t = 0; t < kSteps; ++t) {
      // A key past the last reads as the last; its score is -inf.
      const int row = metal::min(begin + t * Lanes::kSlots + rows.lanes.slot(), part_end - 1);
      int row_of_key = row, row_of_value = row;
      const CodeRows<T> of_key = keys.of_page(row_of_key);
      const CodeRows<T> of_value = values.of_page(row_of_value);
      key[t].load(of_key, row_of_key);
      value[t].load(of_value, row_of_value);
    }

    const int j = begin + rows.lanes.key();
    float score = CappedScore<T>(common, rows.multiply_keys(key, keys.bits)).score;
    if (j >= part_end || ((has_band || is_ragged) && !sees(common, own.query, j, lengths))) {
      score = -INFINITY;
    } else if (has_bool_mask || has_additive_mask) {
      score = own_mask.apply(score, 0, 0);
    }
    own_mask = own_mask.from(0, kStride);
    rows.add(score, value, values.bits);
  }

  rows.softmax.sum = rows.lanes.sum_over_keys(rows.softmax.sum);
  typename GroupRows::Output merged = rows.merged();
  Merge::store(shares_out, shares, at, own, rows.softmax, merged, sinks, out, lse, params.forward);
}

// ---- kernels

#define INSTANTIATE_QUANTIZED_DECODE(dtype, type, d, rows, ...)                  \
  MLX_ANVIL_KERNEL("flash_attention_quantized_decode_" #dtype "_d" #d "r" #rows, \
                   flash_attention_quantized_decode<type, d, rows, __VA_ARGS__>)

MLX_ANVIL_ATTENTION_QUANTIZED_DECODE_TILES(INSTANTIATE_QUANTIZED_DECODE)

// flash_attention for at most 8 queries, where reading keys and values dominates (bandwidth-bound):
//   s[i, j] = cap(scale * q[i] . k[j]) + mask[i, j],  cap(x) = softcap * tanh(x / softcap)
//   lse[i]  = log(sum over visible j of exp(s[i, j]) (+ exp(sink)))
//   out[i]  = sum over visible j of exp(s[i, j] - lse[i]) v[j]
// The rows of a kv head are the queries of all its query heads (decode_row.h). One read of a key
// and its value serves up to `rows` of them.
//
// Kernels: flash_attention_decode_<dtype>_d<head dim>r<rows>.
// Grid: (parts of the keys, kv heads * blocks of rows, batch). Threadgroup: 128, four simdgroups
// that take blocks of keys in turn.
// Bindings: q, k, v, mask, sinks, sequences, pages, out, lse, params.
// Function constants: scores.h; ragged.h; pages.h; 16: keys are in parts (split-K). Then out and
// lse are float32 scratch: for each row and part, the weighted sum of values, and the maximum score
// and sum of weights. Alignment: rows as rows_are_vectors promises; otherwise none. Columns of out
// are contiguous.
//
//   load q of all rows
//   for each block of keys of this simdgroup:
//     load kSteps keys and values per slot
//     for each row: scores = cap(q . k) with mask and band; online softmax; out += weight v
//   merge the slots of the simdgroup, then the four simdgroups through threadgroup memory
//   split:     store the partial out, maximum and sum
//   otherwise: add the sink; store out / sum and lse
//
// Kernels: flash_attention_decode_combine_<dtype>, which merges the parts.
// Grid: (query heads * q_len, batch). Threadgroup: 128.
// Bindings: partial out, partial sums, sinks, out, lse, params.
//
//   m = max over parts and sink; sum = sum over parts of 2^(m_part - m) sum_part + 2^(sink - m)
//   out = sum over parts of 2^(m_part - m) out_part / sum
#include "metal/common/kernel.h"
#include "metal/flash_attention/decode.h"
#include "metal/flash_attention/decode_merge.h"
#include "metal/flash_attention/pages.h"
#include "metal/flash_attention/tiles.h"

template <typename T, int kDim, int kBlockRows, int kSteps, int kRowGroups, int kSimdgroups>
[[kernel, max_total_threads_per_threadgroup(32 * kSimdgroups)]] void flash_attention_decode(
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
  using Merge = DecodeMerge<T, kDim, kBlockRows, kRowGroups, kSimdgroups>;
  enum { kRows = Merge::kRows, kShares = Merge::kShares };
  using GroupRows = DecodeRows<T, kDim, kRows, kSteps>;
  alignas(16) threadgroup float shares_out[kShares][kRowGroups * Merge::kAtOnce][kDim];
  threadgroup OnlineSoftmax shares[kShares][kRowGroups * kRows];

  constant AttentionParams& common = params.common;
  const typename Merge::Place at =
      decode_place<kBlockRows, kRowGroups>(common, group, simdgroup, lane);
  const int batch = at.batch, kv_head = at.kv_head, first_row = at.first_row();

  GroupRows rows;
  rows.begin(lane);
  DecodeRow of_row = decode_row(common, batch, kv_head, first_row);
  MLX_ANVIL_UNROLL
  for (int r = 0; r < kRows; ++r) {
    load_columns<T, GroupRows::kElements>(query_row(q, common, of_row), 0,
                                          rows.lanes.first_column(), true, rows.q[r]);
    of_row = row_after(of_row, common, first_row + r + 1);
  }

  // From here on, the lane's own row and key.
  const DecodeRow own = decode_row(common, batch, kv_head, first_row + rows.lanes.row());
  const RaggedLengths lengths = lengths_of_batch(sequences, common, batch);
  const KeyRange visible = visible_keys(common, 0, lengths.queries(common) - 1, lengths);
  enum { kStride = kShares * GroupRows::kKeys };
  const KeyRange part = parts_are_fixed ? fixed_keys_of_part(params, visible, at.part, kStride)
                                        : keys_of_part(params, visible, at.part);
  const int part_end = part.end;
  const int first = part.begin + at.share * GroupRows::kKeys;
  static_assert(kStride <= 256, "offsets within it fit 32 bits");
  const PageTable table = pages_of_batch(pages, params, batch);
  const CacheRows<T> all_keys = cache_rows(k, common.k_strides, table, batch, kv_head, part_end,
                                           common.head_dim, lengths.first_key());
  const CacheRows<T> all_values = cache_rows(v, common.v_strides, table, batch, kv_head, part_end,
                                             common.v_head_dim, lengths.first_key());
  Rows<T> keys = rows_from(all_keys.head, first);
  Rows<T> values = rows_from(all_values.head, first);
  HeadMask<T> own_mask = mask_of<T>(mask, common, batch, own.head)
                             .from(own.query, lengths.first_key() + first + rows.lanes.key());
  for (int begin = first; begin < part_end; begin += kStride) {
    T key[kSteps][GroupRows::kElements];
    T value[GroupRows::kKeys][GroupRows::kOwn];
    MLX_ANVIL_UNROLL
    for (int t = 0; t < kSteps; ++t) {
      const int row = t * GroupRows::kSlots + rows.lanes.slot();
      const int nearest = metal::min(begin + row, part_end - 1);
      load_columns<T, GroupRows::kElements>(is_paged ? all_keys.row(nearest) : keys,
                                            is_paged ? 0 : row, rows.lanes.first_column(), true,
                                            key[t]);
    }
    MLX_ANVIL_UNROLL
    for (int n = 0; n < GroupRows::kKeys; ++n) {
      const int nearest = metal::min(begin + n, part_end - 1);
      load_columns<T, GroupRows::kOwn>(is_paged ? all_values.row(nearest) : values,
                                       is_paged ? 0 : n, rows.out.first_column, false, value[n]);
    }
    advance<kStride>(keys, rows_are_vectors);
    advance<kStride>(values, rows_are_vectors);

    const int j = begin + rows.lanes.key();
    float score = CappedScore<T>(common, rows.multiply_keys(key)).score;
    if (j >= part_end || ((has_band || is_ragged) && !sees(common, own.query, j, lengths))) {
      score = -INFINITY;
    } else if (has_bool_mask || has_additive_mask) {
      score = own_mask.apply(score, 0, 0);
    }
    own_mask = own_mask.from(0, kStride);
    rows.add(score, value);
  }

  rows.softmax.sum = rows.lanes.sum_over_keys(rows.softmax.sum);
  Merge::store(shares_out, shares, at, own, rows.softmax, rows.out, sinks, out, lse, params);
}

// Parts whose values are on their way at once.
enum { kPartsAtOnce = 8 };

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kCombineThreads)]] void flash_attention_decode_combine(
    const device float* partial_out [[buffer(0)]],
    const device float* partial_sums [[buffer(1)]],
    const device float* sinks [[buffer(2)]],
    device T* out [[buffer(3)]],
    device float* lse [[buffer(4)]],
    constant AttentionForwardParams& params [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constant AttentionParams& common = params.common;
  const DecodeRow row = {int(group.y), int(group.x) / common.q_len, int(group.x) % common.q_len};
  const long first_part = row.index(common) * params.parts;
  const device float2* sums = reinterpret_cast<const device float2*>(partial_sums) + first_part;
  const int column = group.z * kCombineThreads + thread_index;
  const bool is_inside = column < common.v_head_dim;
  const device float* own = partial_out + first_part * common.v_head_dim + (is_inside ? column : 0);

  OnlineSoftmax all;  // its sum: of the lane's own parts
  all.clear();
  float result = 0.0f;
  for (int begin = 0; begin < params.parts; begin += 32) {
    const int count = metal::min(params.parts - begin, 32);
    const float2 part = sums[begin + metal::min(int(lane), count - 1)];
    const float highest = int(lane) < count ? part.x : -INFINITY;
    result *= all.begin_piece(metal::simd_max(highest));
    const float weight = metal::fast::exp2(highest - all.base());
    all.sum = metal::fma(weight, part.y, all.sum);
    for (int first = 0; first < count; first += kPartsAtOnce) {
      float shares[kPartsAtOnce];
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kPartsAtOnce; ++i) {
        const int nearest = begin + metal::min(first + i, count - 1);
        shares[i] = own[long(nearest) * common.v_head_dim];
      }
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kPartsAtOnce; ++i) {
        const float share = first + i < count ? shares[i] : 0.0f;
        result = metal::fma(metal::simd_shuffle(weight, ushort(first + i)), share, result);
      }
    }
  }
  float total = metal::simd_sum(all.sum);
  if (has_sinks) {
    const float sink = row.sink(sinks, common);
    const float factor = all.begin_piece(sink);
    total = all.add_sink(sink, total * factor);
    result *= factor;
  }
  if (is_inside) {
    out[row.out_offset(params) + column] = static_cast<T>(result * inverse_of_total(total));
  }
  if (stores_lse && column == 0) {
    lse[row.index(common)] = all.log_sum_exp(total);
  }
}

// ---- kernels

#define INSTANTIATE_DECODE(dtype, type, d, rows, steps, row_groups, simdgroups) \
  MLX_ANVIL_KERNEL("flash_attention_decode_" #dtype "_d" #d "r" #rows,          \
                   flash_attention_decode<type, d, rows, steps, row_groups, simdgroups>)

#define INSTANTIATE_COMBINE(dtype, type) \
  MLX_ANVIL_KERNEL("flash_attention_decode_combine_" #dtype, flash_attention_decode_combine<type>)

MLX_ANVIL_ATTENTION_DECODE_TILES(INSTANTIATE_DECODE)
INSTANTIATE_COMBINE(float32, float)
INSTANTIATE_COMBINE(float16, half)
INSTANTIATE_COMBINE(bfloat16, bfloat)

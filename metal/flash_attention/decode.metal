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
// Bindings: q, k, v, mask, sinks, out, lse, params.
// Function constants: scores.h; 16: keys are in parts (split-K). Then out and lse are float32
// scratch: for each row and part, the weighted sum of values, and the maximum score and sum of
// weights.
// Alignment: rows as rows_are_vectors promises; otherwise none. Columns of out are contiguous.
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
#include "metal/flash_attention/decode_row.h"
#include "metal/flash_attention/tiles.h"

template <typename T, int kDim, int kRows>
[[kernel, max_total_threads_per_threadgroup(kDecodeThreads)]] void flash_attention_decode(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* v [[buffer(2)]],
    const device uchar* mask [[buffer(3)]],
    const device float* sinks [[buffer(4)]],
    device T* out [[buffer(5)]],
    device float* lse [[buffer(6)]],
    constant AttentionForwardParams& params [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using GroupRows = DecodeRows<T, kDim, kRows>;
  alignas(16) threadgroup float shares_out[kDecodeSimdgroups][kRows][kDim];
  threadgroup OnlineSoftmax shares[kDecodeSimdgroups][kRows];

  constant AttentionParams& common = params.common;
  const int row_count = common.group * common.q_len;
  const int blocks = (row_count + kRows - 1) / kRows;
  const int batch = group.z, kv_head = group.y / blocks;
  const int first_row = group.y % blocks * kRows;

  GroupRows rows;
  rows.begin(lane);
  DecodeRow at[kRows];
  MLX_ANVIL_UNROLL
  for (int r = 0; r < kRows; ++r) {
    at[r] = r == 0 ? decode_row(common, batch, kv_head, first_row)
                   : row_after(at[r - 1], common, first_row + r);
    const Rows<T> one = {q + batch * common.q_strides[0] + at[r].head * common.q_strides[1] +
                             at[r].query * common.q_strides[2],
                         0, common.q_strides[3], 1, common.head_dim};
    T query[GroupRows::kElements];
    load_columns<T, GroupRows::kElements>(one, 0, rows.column, query);
    MLX_ANVIL_UNROLL
    for (int e = 0; e < GroupRows::kElements; ++e) {
      rows.q[r][e] = static_cast<float>(query[e]);
    }
  }

  const KeyRange visible = visible_keys(common, 0, common.q_len - 1);
  const int part_begin = visible.begin + group.x * params.keys_per_part;
  const int part_end = metal::min(visible.end, part_begin + params.keys_per_part);
  const int first = part_begin + int(simdgroup) * GroupRows::kKeys;
  enum { kStride = kDecodeSimdgroups * GroupRows::kKeys };
  Rows<T> keys =
      rows_from(Rows<T>{k + batch * common.k_strides[0] + kv_head * common.k_strides[1],
                        common.k_strides[2], common.k_strides[3], part_end, common.head_dim},
                first);
  Rows<T> values =
      rows_from(Rows<T>{v + batch * common.v_strides[0] + kv_head * common.v_strides[1],
                        common.v_strides[2], common.v_strides[3], part_end, common.v_head_dim},
                first);
  for (int begin = first; begin < part_end; begin += kStride) {
    T key[GroupRows::kSteps][GroupRows::kElements];
    T value[GroupRows::kSteps][GroupRows::kElements];
    MLX_ANVIL_UNROLL
    for (int t = 0; t < GroupRows::kSteps; ++t) {
      const int row = t * GroupRows::kSlots + rows.slot;
      load_columns<T, GroupRows::kElements>(keys, row, rows.column, key[t]);
      load_columns<T, GroupRows::kElements>(values, row, rows.column, value[t]);
    }
    advance<kStride>(keys, rows_are_vectors);
    advance<kStride>(values, rows_are_vectors);
    float scores[kRows][GroupRows::kSteps];
    MLX_ANVIL_UNROLL
    for (int t = 0; t < GroupRows::kSteps; ++t) {
      const int j = begin + t * GroupRows::kSlots + rows.slot;
      float dots[kRows];
      rows.multiply_key(key[t], dots);
      MLX_ANVIL_UNROLL
      for (int r = 0; r < kRows; ++r) {
        float score = CappedScore<T>(common, dots[r]).score;
        if (j >= part_end || (has_band && !sees(common, at[r].query, j))) {
          score = -INFINITY;
        } else if (has_bool_mask || has_additive_mask) {
          score = mask_of<T>(mask, common, batch, at[r].head).apply(score, at[r].query, j);
        }
        scores[r][t] = score;
      }
    }
    MLX_ANVIL_UNROLL
    for (int r = 0; r < kRows; ++r) {
      rows.add(r, scores[r], value);
    }
  }

  // One simdgroup finishes each row. The others hand over their share through threadgroup memory.
  rows.join_slots();
  MLX_ANVIL_UNROLL
  for (int r = 0; r < kRows; ++r) {
    if (lane == 0) {
      shares[simdgroup][r] = rows.softmax[r];
    }
    if (rows.slot == 0 && simdgroup != r % kDecodeSimdgroups) {
      rows.store(r, shares_out[simdgroup][r]);
    }
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);

  MLX_ANVIL_UNROLL
  for (int r = 0; r < kRows; ++r) {
    if (first_row + r >= row_count || simdgroup != r % kDecodeSimdgroups) {
      continue;
    }
    OnlineSoftmax share;  // lane i holds the share of simdgroup i
    share.clear();
    if (lane < kDecodeSimdgroups) {
      share = shares[lane][r];
    }
    OnlineSoftmax all;
    all.clear();
    all.highest = metal::simd_max(share.highest);
    float sink = -INFINITY;
    if (has_sinks && !keys_are_in_parts) {
      sink = at[r].sink(sinks, common);
      all.highest = metal::max(all.highest, sink);
    }
    const float factor = metal::fast::exp2(share.highest - all.base());
    all.sum = metal::simd_sum(share.sum * factor);
    const float total = has_sinks ? all.add_sink(sink, all.sum) : all.sum;
    const float weight = keys_are_in_parts ? factor : factor * inverse_of_total(total);
    rows.scale(r, metal::simd_shuffle(weight, ushort(r % kDecodeSimdgroups)));
    MLX_ANVIL_UNROLL
    for (int s = 0; s < kDecodeSimdgroups; ++s) {
      const float share_weight = metal::simd_shuffle(weight, ushort(s));
      if (s != r % kDecodeSimdgroups && rows.slot == 0) {
        rows.add_share(r, shares_out[s][r], share_weight);
      }
    }

    const long part = at[r].index(common) * params.parts + group.x;
    if (rows.slot == 0) {
      if (keys_are_in_parts) {
        device float* row = reinterpret_cast<device float*>(out) + part * common.v_head_dim;
        rows.store(r, row, common.v_head_dim);
      } else {
        rows.store(r, out + at[r].out_offset(params), common.v_head_dim);
      }
    }
    if (lane == 0 && keys_are_in_parts) {
      lse[2 * part] = all.highest;
      lse[2 * part + 1] = all.sum;
    } else if (lane == 0 && stores_lse) {
      lse[at[r].index(common)] = all.log_sum_exp(total);
    }
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kDecodeThreads)]] void flash_attention_decode_combine(
    const device float* partial_out [[buffer(0)]],
    const device float* partial_sums [[buffer(1)]],
    const device float* sinks [[buffer(2)]],
    device T* out [[buffer(3)]],
    device float* lse [[buffer(4)]],
    constant AttentionForwardParams& params [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float shares[kDecodeSimdgroups][kDecodeThreads];
  constant AttentionParams& common = params.common;
  const DecodeRow row = {int(group.y), int(group.x) / common.q_len, int(group.x) % common.q_len};
  const long first_part = row.index(common) * params.parts;

  // Lanes take parts in turn.
  const device float* sums = partial_sums + 2 * first_part;
  float highest = -INFINITY;
  for (int part = lane; part < params.parts; part += 32) {
    highest = metal::max(highest, sums[2 * part]);
  }
  OnlineSoftmax all;
  all.clear();
  all.highest = metal::simd_max(highest);
  float sink = -INFINITY;
  if (has_sinks) {
    sink = row.sink(sinks, common);
    all.highest = metal::max(all.highest, sink);
  }
  float total = 0.0f;
  for (int part = lane; part < params.parts; part += 32) {
    total = metal::fma(metal::fast::exp2(sums[2 * part] - all.base()), sums[2 * part + 1], total);
  }
  total = metal::simd_sum(total);
  if (has_sinks) {
    total = all.add_sink(sink, total);
  }
  const float inverse = inverse_of_total(total);

  // Simdgroups take parts in turn. Then each thread sums one column.
  enum { kOwn = kDecodeThreads / 32 };
  const device float* parts = partial_out + first_part * common.v_head_dim;
  for (int begin = 0; begin < common.v_head_dim; begin += kDecodeThreads) {
    float own[kOwn] = {};
    for (int part = simdgroup; part < params.parts; part += kDecodeSimdgroups) {
      const float factor = metal::fast::exp2(sums[2 * part] - all.base());
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kOwn; ++i) {
        const int column = begin + 32 * i + lane;
        if (column < common.v_head_dim) {
          own[i] = metal::fma(factor, parts[part * common.v_head_dim + column], own[i]);
        }
      }
    }
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      shares[simdgroup][32 * i + lane] = own[i];
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    float sum = 0.0f;
    MLX_ANVIL_UNROLL
    for (int s = 0; s < kDecodeSimdgroups; ++s) {
      sum += shares[s][thread_index];
    }
    const int column = begin + thread_index;
    if (column < common.v_head_dim) {
      out[row.out_offset(params) + column] = static_cast<T>(sum * inverse);
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
  if (stores_lse && thread_index == 0) {
    lse[row.index(common)] = all.log_sum_exp(total);
  }
}

// ---- kernels

#define INSTANTIATE_DECODE(dtype, type, d, rows)                       \
  MLX_ANVIL_KERNEL("flash_attention_decode_" #dtype "_d" #d "r" #rows, \
                   flash_attention_decode<type, d, rows>)

#define INSTANTIATE_COMBINE(dtype, type) \
  MLX_ANVIL_KERNEL("flash_attention_decode_combine_" #dtype, flash_attention_decode_combine<type>)

MLX_ANVIL_ATTENTION_DECODE_TILES(INSTANTIATE_DECODE, float32, float)
MLX_ANVIL_ATTENTION_DECODE_TILES(INSTANTIATE_DECODE, float16, half)
MLX_ANVIL_ATTENTION_DECODE_TILES(INSTANTIATE_DECODE, bfloat16, bfloat)
INSTANTIATE_COMBINE(float32, float)
INSTANTIATE_COMBINE(float16, half)
INSTANTIATE_COMBINE(bfloat16, bfloat)

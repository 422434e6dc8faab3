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

// Rows of all simdgroups that pass through threadgroup memory together: as many as fit 16 KB, so
// that a core holds several threadgroups.
template <int kDim, int kRows, int kSimdgroups>
struct DecodeRound {
  enum {
    kMost = (16 << 10) / (4 * kDim * kSimdgroups),
    kRowsAtOnce = kMost < 1 ? 1
    : kMost < kRows         ? kMost
                            : kRows,
  };
};

template <typename T, int kDim, int kBlockRows, int kSteps, int kRowGroups, int kSimdgroups>
[[kernel, max_total_threads_per_threadgroup(32 * kSimdgroups)]] void flash_attention_decode(
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
  enum { kRows = kBlockRows / kRowGroups };  // of a simdgroup
  using GroupRows = DecodeRows<T, kDim, kRows, kSteps>;
  enum { kShares = kSimdgroups / kRowGroups };  // simdgroups with the same rows
  enum { kAtOnce = DecodeRound<kDim, kRows, kSimdgroups>::kRowsAtOnce };
  static_assert(kRows % kAtOnce == 0, "whole rounds");
  alignas(16) threadgroup float shares_out[kShares][kRowGroups * kAtOnce][kDim];
  threadgroup OnlineSoftmax shares[kShares][kRowGroups * kRows];

  constant AttentionParams& common = params.common;
  const int row_count = common.group * common.q_len;
  const int blocks = (row_count + kBlockRows - 1) / kBlockRows;
  const int batch = group.z, kv_head = group.y / blocks;
  const int block_row = group.y % blocks * kBlockRows;
  const int row_group = simdgroup % kRowGroups, share = simdgroup / kRowGroups;
  const int first_row = block_row + row_group * kRows;

  GroupRows rows;
  rows.begin(lane);
  DecodeRow at = decode_row(common, batch, kv_head, first_row);
  MLX_ANVIL_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const Rows<T> one = {q + batch * common.q_strides[0] + at.head * common.q_strides[1] +
                             at.query * common.q_strides[2],
                         0, common.q_strides[3], 1, common.head_dim};
    load_columns<T, GroupRows::kElements>(one, 0, rows.first_column(), true, rows.q[r]);
    at = row_after(at, common, first_row + r + 1);
  }

  // From here on, the lane's own row and key.
  const DecodeRow own = decode_row(common, batch, kv_head, first_row + rows.row());
  const KeyRange visible = visible_keys(common, 0, common.q_len - 1);
  const int part_begin = visible.begin + group.x * params.keys_per_part;
  const int part_end = metal::min(visible.end, part_begin + params.keys_per_part);
  const int first = part_begin + share * GroupRows::kKeys;
  enum { kStride = kShares * GroupRows::kKeys };
  static_assert(kStride <= 256, "offsets within it fit 32 bits");
  Rows<T> keys =
      rows_from(Rows<T>{k + batch * common.k_strides[0] + kv_head * common.k_strides[1],
                        common.k_strides[2], common.k_strides[3], part_end, common.head_dim},
                first);
  Rows<T> values =
      rows_from(Rows<T>{v + batch * common.v_strides[0] + kv_head * common.v_strides[1],
                        common.v_strides[2], common.v_strides[3], part_end, common.v_head_dim},
                first);
  HeadMask<T> own_mask =
      mask_of<T>(mask, common, batch, own.head).from(own.query, first + rows.key());
  for (int begin = first; begin < part_end; begin += kStride) {
    T key[kSteps][GroupRows::kElements];
    T value[GroupRows::kKeys][GroupRows::kOwn];
    MLX_ANVIL_UNROLL
    for (int t = 0; t < kSteps; ++t) {
      load_columns<T, GroupRows::kElements>(keys, t * GroupRows::kSlots + rows.slot(),
                                            rows.first_column(), true, key[t]);
    }
    MLX_ANVIL_UNROLL
    for (int n = 0; n < GroupRows::kKeys; ++n) {
      load_columns<T, GroupRows::kOwn>(values, n, rows.first_own_column(), false, value[n]);
    }
    advance<kStride>(keys, rows_are_vectors);
    advance<kStride>(values, rows_are_vectors);

    const int j = begin + rows.key();
    float score = CappedScore<T>(common, rows.multiply_keys(key)).score;
    if (j >= part_end || (has_band && !sees(common, own.query, j))) {
      score = -INFINITY;
    } else if (has_bool_mask || has_additive_mask) {
      score = own_mask.apply(score, 0, 0);
    }
    own_mask = own_mask.from(0, kStride);
    rows.add(score, value);
  }

  // The simdgroups tell each other the maxima and sums of their rows.
  rows.softmax.sum = rows.sum_over_keys(rows.softmax.sum);
  if (lane < kRows) {
    shares[share][row_group * kRows + rows.row()] = rows.softmax;
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  enum { kSharesAtOnce = 32 / kRows, kTurns = (kShares + kSharesAtOnce - 1) / kSharesAtOnce };
  OnlineSoftmax others[kTurns];
  OnlineSoftmax all;
  all.clear();
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kTurns; ++i) {
    const int s = i * kSharesAtOnce + lane / kRows;
    others[i].clear();
    if (s < kShares) {
      others[i] = shares[s][row_group * kRows + rows.row()];
    }
    all.highest = metal::fmax(all.highest, others[i].highest);
  }
  all.highest = over_lanes<true, kRows>(all.highest);
  float sink = -INFINITY;
  if (has_sinks && !keys_are_in_parts) {
    sink = own.sink(sinks, common);
    all.highest = metal::max(all.highest, sink);
  }
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kTurns; ++i) {
    all.sum = metal::fma(metal::fast::exp2(others[i].highest - all.base()), others[i].sum, all.sum);
  }
  all.sum = over_lanes<false, kRows>(all.sum);
  const float total = has_sinks && !keys_are_in_parts ? all.add_sink(sink, all.sum) : all.sum;
  const float factor = metal::fast::exp2(rows.softmax.highest - all.base());
  rows.scale(keys_are_in_parts ? factor : factor * inverse_of_total(total));

  if (share == 0 && lane < kRows && first_row + rows.row() < row_count) {
    if (keys_are_in_parts) {
      const long part = own.index(common) * params.parts + group.x;
      lse[2 * part] = all.highest;
      lse[2 * part + 1] = all.sum;
    } else if (stores_lse) {
      lse[own.index(common)] = all.log_sum_exp(total);
    }
  }

  // Then each thread sums a column of the output at a time.
  MLX_ANVIL_UNROLL
  for (int begin = 0; begin < kRows; begin += kAtOnce) {
    if (begin > 0) {
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
    MLX_ANVIL_UNROLL
    for (int r = 0; r < kAtOnce; ++r) {
      rows.store(begin + r, shares_out[share][row_group * kAtOnce + r]);
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (int i = simdgroup * 32 + lane; i < kRowGroups * kAtOnce * kDim; i += 32 * kSimdgroups) {
      const int r = i / kDim, column = i % kDim;
      const int row = block_row + r / kAtOnce * kRows + begin + r % kAtOnce;
      if (row < row_count && column < common.v_head_dim) {
        float sum = 0.0f;
        MLX_ANVIL_UNROLL
        for (int s = 0; s < kShares; ++s) {
          sum += shares_out[s][r][column];
        }
        const DecodeRow to = decode_row(common, batch, kv_head, row);
        if (keys_are_in_parts) {
          const long part = to.index(common) * params.parts + group.x;
          reinterpret_cast<device float*>(out)[part * common.v_head_dim + column] = sum;
        } else {
          out[to.out_offset(params) + column] = static_cast<T>(sum);
        }
      }
    }
  }
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

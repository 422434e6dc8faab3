// Rows of a decode. The rows of a kv head are the queries of all its query heads: row r is query r
// % q_len of head r / q_len of the group.
#pragma once

#include "metal/common/tile.h"
#include "metal/flash_attention/ragged.h"

constant bool parts_are_fixed [[function_constant(15)]];  // by positions, whichever are visible
constant bool keys_are_in_parts [[function_constant(16)]];

enum { kCombineThreads = 128 };

// One row of the result.
struct DecodeRow {
  int batch;
  int head;
  int query;

  METAL_FUNC long index(constant AttentionParams& params) const thread {
    return (long(batch) * params.q_heads + head) * params.q_len + query;
  }
  METAL_FUNC long out_offset(constant AttentionForwardParams& params) const thread {
    return batch * params.out_strides[0] + head * params.out_strides[1] +
           query * params.out_strides[2];
  }
  METAL_FUNC float sink(const device float* sinks, constant AttentionParams& params) const thread {
    return M_LOG2E_F * sinks[batch * params.sinks_strides[0] + head * params.sinks_strides[1]];
  }
};

// Rows past the last repeat the last one and are not stored.
METAL_FUNC DecodeRow decode_row(constant AttentionParams& params, int batch, int kv_head, int row) {
  row = metal::min(row, params.group * params.q_len - 1);
  return {batch, kv_head * params.group + row / params.q_len, row % params.q_len};
}

// The row after `before`, which is row `row` - 1.
METAL_FUNC DecodeRow row_after(DecodeRow before, constant AttentionParams& params, int row) {
  if (row >= params.group * params.q_len) {
    return before;
  }
  const bool same_head = before.query + 1 < params.q_len;
  return {before.batch, same_head ? before.head : before.head + 1,
          same_head ? before.query + 1 : 0};
}

// Returns the keys of a part. Sequences of a ragged batch have the same number of parts of their
// own keys, unless these were too small: then the last ones are empty. Parts begin at multiples of
// `multiple`, a power of two; some keys before the first visible one may be in the first.
METAL_FUNC KeyRange keys_of_part(constant AttentionForwardParams& params,
                                 KeyRange visible,
                                 uint part,
                                 int multiple = 1) {
  visible.begin &= -multiple;
  int keys = params.keys_per_part;
  if (is_ragged) {
    keys = metal::max(keys, (visible.end - visible.begin + params.parts - 1) / params.parts);
  }
  keys = (keys + multiple - 1) & -multiple;
  const int begin = visible.begin + part * keys;
  return {begin, metal::min(visible.end, begin + keys)};
}

// The same where parts have keys_per_part keys, whichever of them are visible. Starts at the first
// visible key or up to `stride` before it, at a multiple of `stride` from the part's first key on.
METAL_FUNC KeyRange fixed_keys_of_part(constant AttentionForwardParams& params,
                                       KeyRange visible,
                                       uint part,
                                       int stride) {
  const int begin = part * params.keys_per_part;
  const int hidden = metal::max(0, visible.begin - begin);
  return {begin + hidden / stride * stride, metal::min(visible.end, begin + params.keys_per_part)};
}

// Returns a row of q.
template <typename T>
METAL_FUNC Rows<T> query_row(const device T* q, constant AttentionParams& params, DecodeRow row) {
  return {q + row.batch * params.q_strides[0] + row.head * params.q_strides[1] +
              row.query * params.q_strides[2],
          0, params.q_strides[3], 1, params.head_dim};
}

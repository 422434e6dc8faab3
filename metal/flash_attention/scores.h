// What the kernels of flash_attention share: function constants, the keys that a query sees, and
// the way from a product q . k to a score in the log2 domain.
#pragma once

#include <metal_stdlib>

#include "metal/common/tile.h"
#include "metal/flash_attention/params.h"

// Rows of q, k, v (and out, d_out) are dense, start at multiples of 16 bytes and are whole numbers
// of 16 bytes long; otherwise elements move one by one, with any strides.
constant bool vector_loads [[function_constant(0)]];
constant bool has_bool_mask [[function_constant(1)]];
constant bool has_additive_mask [[function_constant(2)]];
constant bool has_sinks [[function_constant(3)]];
constant bool has_softcap [[function_constant(4)]];

enum { kSimdgroups = 4, kAttentionThreads = 32 * kSimdgroups };

constant constexpr float kLog2E = 1.44269504088896341f;
constant constexpr float kLn2 = 0.69314718055994531f;

struct Range {
  int begin;
  int end;
  bool contains(int first, int count) const { return begin <= first && first + count <= end; }
  bool meets(int first, int count) const { return begin < first + count && first < end; }
};

// Keys that some query of [first, last] sees.
inline Range keys_of_any(constant AttentionParams& params, int first, int last) {
  const int offset = params.kv_len - params.q_len;
  return {metal::max(0, first + offset - params.window_left),
          metal::min(params.kv_len, last + offset + params.window_right + 1)};
}

// Keys that all of them see.
inline Range keys_of_all(constant AttentionParams& params, int first, int last) {
  const int offset = params.kv_len - params.q_len;
  return {metal::max(0, last + offset - params.window_left),
          metal::min(params.kv_len, first + offset + params.window_right + 1)};
}

// Queries that see some key of [first, last].
inline Range queries_of_any(constant AttentionParams& params, int first, int last) {
  const int offset = params.kv_len - params.q_len;
  return {metal::max(0, first - offset - params.window_right),
          metal::min(params.q_len, last - offset + params.window_left + 1)};
}

// Queries that see all of them.
inline Range queries_of_all(constant AttentionParams& params, int first, int last) {
  const int offset = params.kv_len - params.q_len;
  return {metal::max(0, last - offset - params.window_right),
          metal::min(params.q_len, first - offset + params.window_left + 1)};
}

inline bool sees(constant AttentionParams& params, int query, int key) {
  const int distance = key - (query + params.kv_len - params.q_len);
  return key < params.kv_len && query < params.q_len && distance <= params.window_right &&
         -distance <= params.window_left;
}

// The mask of one batch and head.
template <typename T>
struct MaskView {
  const device bool* visible;
  const device T* bias;
  long query_stride;
  long key_stride;

  MaskView(const device void* mask, constant AttentionParams& params, int batch, int head) {
    const long offset = batch * params.mask_strides[0] + head * params.mask_strides[1];
    visible = static_cast<const device bool*>(mask) + offset;
    bias = static_cast<const device T*>(mask) + offset;
    query_stride = params.mask_strides[2];
    key_stride = params.mask_strides[3];
  }
};

// tanh((scale / softcap) q . k), the score in units of the cap.
inline float capped(constant AttentionParams& params, float product) {
  return metal::precise::tanh(product * (params.scale / params.softcap));
}

// Score in the log2 domain, without the mask. `cap` is `capped` of the product, if there is a cap.
inline float unmasked_score(constant AttentionParams& params, float product, float cap) {
  return has_softcap ? cap * (params.softcap * kLog2E) : product * (params.scale * kLog2E);
}

// The score of a pair that may lie outside the window or the matrix.
template <typename T>
float masked_score(constant AttentionParams& params,
                   thread const MaskView<T>& mask,
                   int query,
                   int key,
                   float score) {
  if (!sees(params, query, key)) {
    return -INFINITY;
  }
  const long at = query * mask.query_stride + key * mask.key_stride;
  if (has_bool_mask && !mask.visible[at]) {
    return -INFINITY;
  }
  return has_additive_mask ? score + static_cast<float>(mask.bias[at]) * kLog2E : score;
}

inline bool has_mask() {
  return has_bool_mask || has_additive_mask;
}

template <typename T>
DeviceMatrix<T> head_rows(
    const device T* data, constant int64_t* strides, int batch, int head, int rows, int columns) {
  return {data + batch * strides[0] + head * strides[1], strides[2], strides[3], rows, columns};
}

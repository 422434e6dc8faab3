// From the product q . k to the score that softmax takes: scale, softcap, mask, and which keys a
// query sees. Shared by all attention kernels. Scores are in units of log2: exp2 is what GPUs have.
//
// Specialisations of a kernel give the same bits: a result depends neither on what a gradient needs
// stored nor on how rows lie in memory. So sums of products say fma: whether `a * b + c` is rounded
// once, and which product of `a * b + c * d` is, a compiler may choose anew for each of them.
#pragma once

#include <metal_stdlib>

#include "metal/flash_attention/params.h"

// The features of a call; kernels without one do not pay for it.
constant bool has_band [[function_constant(0)]];  // causal or window
constant bool has_softcap [[function_constant(1)]];
constant bool has_bool_mask [[function_constant(2)]];
constant bool has_additive_mask [[function_constant(3)]];
constant bool has_sinks [[function_constant(4)]];
// Whether each row of q, k, v and the outputs is one run of whole, aligned 16-byte vectors;
// otherwise elements move one by one.
constant bool rows_are_vectors [[function_constant(5)]];
// Of the kernels that can.
constant bool stores_lse [[function_constant(6)]];

struct KeyRange {
  int begin;
  int end;
};

// The keys that some query of [first, last] sees; others need no visit.
METAL_FUNC KeyRange visible_keys(constant AttentionParams& params, int first, int last) {
  if (!has_band) {
    return {0, params.kv_len};
  }
  return {metal::max(0, first + params.band_low),
          metal::min(params.kv_len, last + params.band_high + 1)};
}

struct QueryRange {
  int begin;
  int end;
};

// The queries that see some key of [first, last].
METAL_FUNC QueryRange seeing_queries(constant AttentionParams& params, int first, int last) {
  if (!has_band) {
    return {0, params.q_len};
  }
  return {metal::max(0, first - params.band_high),
          metal::min(params.q_len, last - params.band_low + 1)};
}

// Whether each query of [first, last] sees each key of [begin, end).
METAL_FUNC bool sees_all(
    constant AttentionParams& params, int first, int last, int begin, int end) {
  return end <= params.kv_len &&
         (!has_band || (begin >= last + params.band_low && end - 1 <= first + params.band_high));
}

METAL_FUNC bool sees(constant AttentionParams& params, int query, int key) {
  return key < params.kv_len &&
         (!has_band || (key >= query + params.band_low && key <= query + params.band_high));
}

// For scores of 16-bit operands: right to 2^-22, not to 2^-22 of a small result.
METAL_FUNC float tanh_of_16_bits(float x) {
  return 1.0f - metal::fast::divide(2.0f, 1.0f + metal::fast::exp2(2.0f * M_LOG2E_F * x));
}

// Of operands of type T.
template <typename T>
struct CappedScore {
  float tanh_of_score;  // with softcap
  float score;

  METAL_FUNC CappedScore(constant AttentionParams& params, float dot) thread {
    score = dot * params.score_scale;
    if (has_softcap) {
      tanh_of_score = sizeof(T) == 2 ? tanh_of_16_bits(score) : metal::precise::tanh(score);
      score = params.softcap * tanh_of_score;
    }
  }

  // d capped / d score
  METAL_FUNC float slope() const thread {
    return has_softcap ? 1.0f - tanh_of_score * tanh_of_score : 1.0f;
  }
};

// The mask of one head. Its elements are bool, or numbers of the operands' dtype.
template <typename T>
struct HeadMask {
  const device uchar* data;
  long row_stride;
  long column_stride;

  // The score of a pair that exists, with the mask applied.
  METAL_FUNC float apply(float score, int query, int key) const thread {
    const long at = query * row_stride + key * column_stride;
    if (has_bool_mask) {
      return data[at] ? score : -INFINITY;
    }
    return metal::fma(M_LOG2E_F, static_cast<float>(reinterpret_cast<const device T*>(data)[at]),
                      score);
  }
};

template <typename T>
METAL_FUNC HeadMask<T> mask_of(const device uchar* mask,
                               constant AttentionParams& params,
                               long batch,
                               long head) {
  const long element = has_bool_mask ? 1 : sizeof(T);
  const long first = batch * params.mask_strides[0] + head * params.mask_strides[1];
  return {mask + first * element, params.mask_strides[2], params.mask_strides[3]};
}

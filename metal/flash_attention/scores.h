// Computes the score that enters softmax from the product q . k: scale, softcap, mask and band. All
// attention kernels share it. Scores are in units of log2, because GPUs have an exp2 instruction.
//
// All specialisations of a kernel produce the same bits. Results depend neither on the gradients
// that are requested nor on the layout of rows. So sums of products use explicit fma: contraction
// of `a * b + c`, or of either product in `a * b + c * d`, could differ between specialisations.
#pragma once

#include <metal_stdlib>

#include "metal/flash_attention/params.h"

// Features of a call. A specialisation pays only for those it has.
constant bool has_band [[function_constant(0)]];  // causal or sliding window
constant bool has_softcap [[function_constant(1)]];
constant bool has_bool_mask [[function_constant(2)]];
constant bool has_additive_mask [[function_constant(3)]];
constant bool has_sinks [[function_constant(4)]];
// True if each row of q, k, v and the outputs is a run of whole, aligned 16-byte vectors, and
// neighbouring rows, and elements of a mask, are at most 2^22 elements apart, so that offsets
// within a tile fit 32 bits. Otherwise elements move one by one, with 64-bit offsets.
constant bool rows_are_vectors [[function_constant(5)]];
// Only in kernels that can store it.
constant bool stores_lse [[function_constant(6)]];
// Only in kernels with tiles of fixed head dims: q and k have as many columns as the tile, and so
// have v and the output.
constant bool heads_fill_tile [[function_constant(10)]];

// The lengths of a batch whose sequences are as long as its arrays. Those of a ragged batch are
// RaggedLengths (ragged.h), which has the same members.
struct EqualLengths {
  METAL_FUNC int queries(constant AttentionParams& params) const thread { return params.q_len; }
  METAL_FUNC int keys(constant AttentionParams& params) const thread { return params.kv_len; }
  METAL_FUNC int rows(constant AttentionParams& params) const thread { return params.q_len; }
  METAL_FUNC int first_query() const thread { return 0; }
  METAL_FUNC int first_key() const thread { return 0; }
  METAL_FUNC int band_shift() const thread { return 0; }
  METAL_FUNC bool has_query(int) const thread { return true; }
};

struct KeyRange {
  int begin;
  int end;
};

// Returns the keys that at least one query of [first, last] sees; the kernels skip the others.
template <typename Lengths = EqualLengths>
METAL_FUNC KeyRange
visible_keys(constant AttentionParams& params, int first, int last, Lengths lengths = Lengths()) {
  if (!has_band) {
    return {0, lengths.keys(params)};
  }
  return {metal::max(0, first + params.band_low + lengths.band_shift()),
          metal::min(lengths.keys(params), last + params.band_high + lengths.band_shift() + 1)};
}

struct QueryRange {
  int begin;
  int end;
};

// Returns the queries that see at least one key of [first, last].
template <typename Lengths = EqualLengths>
METAL_FUNC QueryRange
seeing_queries(constant AttentionParams& params, int first, int last, Lengths lengths = Lengths()) {
  if (!has_band) {
    return {0, lengths.queries(params)};
  }
  return {metal::max(0, first - params.band_high - lengths.band_shift()),
          metal::min(lengths.queries(params), last - params.band_low - lengths.band_shift() + 1)};
}

// True if every query of [first, last] sees every key of [begin, end).
template <typename Lengths = EqualLengths>
METAL_FUNC bool sees_all(constant AttentionParams& params,
                         int first,
                         int last,
                         int begin,
                         int end,
                         Lengths lengths = Lengths()) {
  return end <= lengths.keys(params) && lengths.has_query(last) &&
         (!has_band || (begin >= last + params.band_low + lengths.band_shift() &&
                        end - 1 <= first + params.band_high + lengths.band_shift()));
}

template <typename Lengths = EqualLengths>
METAL_FUNC bool sees(constant AttentionParams& params,
                     int query,
                     int key,
                     Lengths lengths = Lengths()) {
  return key < lengths.keys(params) && lengths.has_query(query) &&
         (!has_band || (key >= query + params.band_low + lengths.band_shift() &&
                        key <= query + params.band_high + lengths.band_shift()));
}

// The keys that one query sees. A test of a key is a sum and a comparison.
struct SeenKeys {
  int begin;
  uint count;

  METAL_FUNC bool operator()(int key) const thread { return uint(key - begin) < count; }
};

template <typename Lengths = EqualLengths>
METAL_FUNC SeenKeys seen_keys(constant AttentionParams& params,
                              int query,
                              Lengths lengths = Lengths()) {
  const int count = lengths.has_query(query) ? lengths.keys(params) : 0;
  if (!has_band) {
    return {0, uint(count)};
  }
  const int begin = query + params.band_low + lengths.band_shift();
  const int end = metal::min(query + params.band_high + lengths.band_shift() + 1, count);
  return {begin, uint(metal::max(end - begin, 0))};
}

// Accurate to an absolute error of 2^-22, which suffices for scores of 16-bit operands.
METAL_FUNC float tanh_of_16_bits(float x) {
  return 1.0f - metal::fast::divide(2.0f, 1.0f + metal::fast::exp2(2.0f * M_LOG2E_F * x));
}

// Score of operands of type T.
template <typename T>
struct CappedScore {
  float tanh_of_score;  // set only with softcap
  float score;

  METAL_FUNC CappedScore(constant AttentionParams& params, float dot) thread {
    score = dot * params.score_scale;
    if (has_softcap) {
      tanh_of_score = sizeof(T) == 2 ? tanh_of_16_bits(score) : metal::precise::tanh(score);
      score = params.softcap * tanh_of_score;
    }
  }

  // d(capped score) / d(score)
  METAL_FUNC float slope() const thread {
    return has_softcap ? 1.0f - tanh_of_score * tanh_of_score : 1.0f;
  }
};

// The mask of one head. Elements are bool, or have the operands' dtype.
template <typename T>
struct HeadMask {
  const device uchar* data;
  long row_stride;
  long column_stride;

  // Applies the mask to the score of a valid (query, key) pair.
  METAL_FUNC float apply(float score, int query, int key) const thread {
    return apply_at(score, query * row_stride + key * column_stride);
  }

  // The same for a pair `rows` and `columns` from another, both less than a tile.
  METAL_FUNC float apply_near(float score, int query, int key, int rows, int columns) const thread {
    if (!rows_are_vectors) {
      return apply(score, query + rows, key + columns);
    }
    HeadMask near = *this;
    near.data += (query * row_stride + key * column_stride) * (has_bool_mask ? 1 : sizeof(T));
    return near.apply_at(score, rows * int(row_stride) + columns * int(column_stride));
  }

  // Returns the mask from a pair on.
  METAL_FUNC HeadMask from(int query, int key) const thread {
    const long element = has_bool_mask ? 1 : sizeof(T);
    return {data + (query * row_stride + key * column_stride) * element, row_stride, column_stride};
  }

 private:
  template <typename Offset>
  METAL_FUNC float apply_at(float score, Offset at) const thread {
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
                               int batch,
                               int head) {
  const long element = has_bool_mask ? 1 : sizeof(T);
  const long first = batch * params.mask_strides[0] + head * params.mask_strides[1];
  return {mask + first * element, params.mask_strides[2], params.mask_strides[3]};
}

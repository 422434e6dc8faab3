// The part of a decode by matrix products that one SIMD group computes: 8 rows, some of the keys.
//
// Scores are formed transposed, k q^T, so that keys go from device memory straight into fragments.
#pragma once

#include "metal/common/online_softmax.h"
#include "metal/common/tile.h"
#include "metal/flash_attention/decode_row.h"

// Column 32 j + 8 c + 2 p + e of a row is element 2 c + e of its fragment 4 j + p: a lane's pairs
// of four fragments then are one vector in memory. Any order will do, as long as all take the same.
METAL_FUNC int place_of_column(int column) {
  return column / 32 * 32 + column / 2 % 4 * 8 + column / 8 % 4 * 2 + column % 2;
}

METAL_FUNC int column_of_pair(int index, FragmentPlace place) {
  return index / 4 * 32 + place.column * 4 + index % 4 * 2;
}

// The fragments of 8 rows, of which this is the lane's; zeros from `columns` on. Rows are vectors.
template <typename T, int kDim>
METAL_FUNC void load_fragments(const device T* row,
                               int columns,
                               FragmentPlace place,
                               thread Fragment<T> (&fragments)[kDim / 8]) {
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kDim / 8; i += 4) {
    const int column = column_of_pair(i, place);
    uint4 raw = uint4(0);
    if (column < columns) {
      raw = *reinterpret_cast<const device uint4*>(row + column);
    }
    MLX_ANVIL_UNROLL
    for (int p = 0; p < 4; ++p) {
      const Pair<T> pair = metal::as_type<Pair<T>>(raw[p]);
      fragments[i + p] = fragment_of<T>(pair.x, pair.y);
    }
  }
}

template <typename T, int kDim>
struct DecodeMatrixRows {
  enum { kFragments = kDim / 8, kKeyFragments = 2, kKeys = 8 * kKeyFragments };

  FragmentPlace place;              // of this lane
  Fragment<T> q[kFragments];        // transposed: a column for each row of the decode
  Fragment<float> out[kFragments];  // a row for each
  OnlineSoftmax softmax[2];         // of the rows place.column and place.column + 1
  DecodeRow at[2];                  // likewise

  // `tile`: the rows of q, with their columns where place_of_column says.
  METAL_FUNC void begin(const threadgroup T* tile, int stride) thread {
    MLX_ANVIL_UNROLL
    for (int d = 0; d < kFragments; ++d) {
      q[d] = load_transposed(tile + 8 * d, stride, place);
      out[d] = fragment_of<float>(0.0f, 0.0f);
    }
    softmax[0].clear();
    softmax[1].clear();
  }

  // Adds kKeys keys from `begin` on, as far as they are before `end`.
  METAL_FUNC void attend(const device T* keys,
                         const device T* values,
                         int begin,
                         int end,
                         const device uchar* mask,
                         constant AttentionParams& params) thread {
    Fragment<T> k[kKeyFragments][kFragments], v[kKeyFragments][kFragments];
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kKeyFragments; ++i) {
      const int key = begin + 8 * i + place.row;
      const bool exists = key < end;
      load_fragments<T, kDim>(keys + key * params.k_strides[2], exists ? params.head_dim : 0, place,
                              k[i]);
      load_fragments<T, kDim>(values + key * params.v_strides[2], exists ? params.v_head_dim : 0,
                              place, v[i]);
    }
    Fragment<float> scores[kKeyFragments];
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kKeyFragments; ++i) {
      scores[i] = fragment_of<float>(0.0f, 0.0f);
    }
    MLX_ANVIL_UNROLL
    for (int d = 0; d < kFragments; ++d) {
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kKeyFragments; ++i) {
        metal::simdgroup_multiply_accumulate(scores[i], k[i][d], q[d], scores[i]);
      }
    }

    float factors[2];
    MLX_ANVIL_UNROLL
    for (int e = 0; e < 2; ++e) {
      factors[e] = add_scores(scores, e, begin, end, mask, params);
    }
    const float factor = of_own_row(factors);
    Fragment<T> weights[kKeyFragments];
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kKeyFragments; ++i) {
      weights[i] = transposed(fragment_of<T>(elements_of(scores[i])), place);
    }
    MLX_ANVIL_UNROLL
    for (int d = 0; d < kFragments; ++d) {
      out[d] = fragment_of<float>(elements_of(out[d]) * factor);
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kKeyFragments; ++i) {
        metal::simdgroup_multiply_accumulate(out[d], weights[i], v[i][d], out[d]);
      }
    }
  }

  // Makes weights of the products in column place.column + e. Returns by what earlier results
  // shrink.
  METAL_FUNC float add_scores(thread Fragment<float> (&scores)[kKeyFragments],
                              int e,
                              int begin,
                              int end,
                              const device uchar* mask,
                              constant AttentionParams& params) thread {
    float highest = -INFINITY;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kKeyFragments; ++i) {
      const int key = begin + 8 * i + place.row;
      float score = scaled(params, scores[i].thread_elements()[e]);
      if (key >= end || !sees(params, at[e].query, key)) {
        score = -INFINITY;
      } else if (has_bool_mask || has_additive_mask) {
        score = mask_of<T>(mask, params, at[e].batch, at[e].head).apply(score, at[e].query, key);
      }
      scores[i].thread_elements()[e] = score;
      highest = metal::max(highest, score);
    }
    const float factor = softmax[e].begin_piece(column_max(highest));
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kKeyFragments; ++i) {
      const float weight = metal::fast::exp2(scores[i].thread_elements()[e] - softmax[e].base());
      scores[i].thread_elements()[e] = weight;
      softmax[e].sum += weight;
    }
    return factor;
  }

  // What lanes have for two columns each, for row place.row of the decode.
  METAL_FUNC float of_own_row(const thread float (&x)[2]) const thread {
    const ushort source = lane_of({0, short(place.row / 2 * 2)});
    const float even = metal::simd_shuffle(x[0], source);
    const float odd = metal::simd_shuffle(x[1], source);
    return place.row % 2 == 0 ? even : odd;
  }
};

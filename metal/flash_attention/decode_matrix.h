// The part of a decode that one simdgroup computes with matrix products: 8 query rows, for some of
// the keys.
//
// Keys and values go from device memory straight into operand registers, 16 bytes at a time. Scores
// are k q^T. A sum over columns may take them in any order, so the four pairs in a lane's 16 bytes
// of a key serve as its elements of four fragments. The output is accumulated as v^T p^T. Each of
// its fragments covers every eighth of 64 columns, so that a lane's elements come from its 16 bytes
// of two adjacent keys. The weights replace the scores in place, which is where the product needs
// p^T.
//
//   for each block of keys (attend):
//     scores = k q^T; start loading the next keys
//     softcap, mask, band; rescale if the maximum grows by more than kHeadroom
//     weights = 2^(scores - m); sum += weights
//     out += v^T weights; start loading the next values
#pragma once

#include "metal/common/online_softmax.h"
#include "metal/common/pack.h"
#include "metal/common/reg_tile.h"
#include "metal/flash_attention/decode_row.h"
#include "metal/flash_attention/scores.h"

// Loads the 8 elements that start at (row, column). Reads zeros outside the operand.
template <typename T>
METAL_FUNC uint4 load_eight(Rows<T> from, int row, int column) {
  uint4 eight = uint4(0);
  const device T* at = from.data + row * from.row_stride;
  if (rows_are_vectors) {
    if (row < from.rows && column < from.columns) {
      eight = *reinterpret_cast<const device uint4*>(at + column);
    }
  } else {
    const int columns = row < from.rows ? from.columns - column : 0;
    at += column * from.column_stride;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 8; ++i) {  // incremental addresses: precomputed ones would occupy registers
      if (i < columns) {
        eight[i / 2] |= uint(as_type<ushort>(*at)) << (16 * (i % 2));
        at += from.column_stride;
      }
    }
  }
  return eight;
}

// Rescale only if weights could exceed 2^8, so that most blocks exchange nothing between lanes.
// 16-bit floats represent weights up to 2^8 with the same relative precision as those up to 1.
enum { kHeadroom = 8 };

template <typename T>
METAL_FUNC Pair<T> pair_in(uint4 eight, int pair) {
  return as_type<Pair<T>>(eight[pair]);
}

// A block of keys in registers: kKeys x kDim, the left operand of k q^T. A lane has 16 bytes of
// every 32 columns; fragment k has pair k % 4 of them.
template <typename T, int kDim, int kKeys>
struct KeyVectors {
  using Element = T;
  enum { kColumnFragments = kDim / 8, kVectors = kDim / 32, kKeyFragments = kKeys / 8 };

  uint4 vectors[kKeyFragments][kVectors];  // of key place.row of each fragment

  // First of the lane's eight columns in vector i.
  METAL_FUNC static int column(int i, FragmentPlace place) { return 32 * i + 4 * place.column; }

  METAL_FUNC Fragment<T> block(int n, int k) const thread {
    const Pair<T> pair = pair_in<T>(vectors[n][k / 4], k % 4);
    return fragment_of<T>(pair.x, pair.y);
  }

  METAL_FUNC void load(Rows<T> keys, int begin, FragmentPlace place) thread {
    MLX_ANVIL_UNROLL
    for (int v = 0; v < kKeyFragments * kVectors; ++v) {
      const int n = v / kVectors, i = v % kVectors;
      vectors[n][i] = load_eight(keys, begin + 8 * n + place.row, column(i, place));
    }
  }
};

// A block of values in registers, transposed: kDim x kKeys, the left operand of v^T p^T. A lane has
// 16 bytes of every 64 columns of two keys; fragment f has element f % 8 of both.
template <typename T, int kDim, int kKeys>
struct ValueVectors {
  using Element = T;
  enum { kColumnFragments = kKeys / 8, kVectors = kDim / 64 };

  uint4 vectors[kColumnFragments][2][kVectors];  // of keys place.column and place.column + 1

  // First of the lane's eight columns in vector i.
  METAL_FUNC static int column(int i, FragmentPlace place) { return 64 * i + 8 * place.row; }

  METAL_FUNC Fragment<T> block(int f, int n) const thread {
    const Pair<T> first = pair_in<T>(vectors[n][0][f / 8], f % 8 / 2);
    const Pair<T> second = pair_in<T>(vectors[n][1][f / 8], f % 8 / 2);
    return fragment_of<T>(first[f % 2], second[f % 2]);
  }

  METAL_FUNC void load(Rows<T> values, int begin, FragmentPlace place) thread {
    MLX_ANVIL_UNROLL
    for (int v = 0; v < 2 * kColumnFragments * kVectors; ++v) {
      const int n = v / (2 * kVectors), e = v / kVectors % 2, i = v % kVectors;
      vectors[n][e][i] = load_eight(values, begin + 8 * n + place.column + e, column(i, place));
    }
  }
};

template <typename T, int kDim, int kKeys>
struct DecodeMatrixRows {
  static_assert(sizeof(T) == 2, "eight elements are 16 bytes");
  enum { kKeyFragments = kKeys / 8, kOutFragments = kDim / 8, kRows = 8 };
  using Keys = KeyVectors<T, kDim, kKeys>;
  using Values = ValueVectors<T, kDim, kKeys>;

  FragmentPlace place;
  Rows<T> all_keys;    // keys of this part
  Rows<T> all_values;  // values of this part
  DecodeRow at[2];     // rows place.column and place.column + 1
  OnlineSoftmax softmax[2];
  RegTile<T, kDim, kRows> q;        // columns x rows, in the order of KeyVectors
  RegTile<float, kDim, kRows> out;  // columns x rows, in the order of ValueVectors
  // The next block, prefetched while the current one is processed.
  Keys keys;
  Values values;

  // `query` is row place.row.
  METAL_FUNC void begin(const device T* query, constant AttentionParams& params) thread {
    const Rows<T> one = {query, 0, params.q_strides[3], 1, params.head_dim};
    MLX_ANVIL_UNROLL
    for (int k = 0; k < kOutFragments; k += 4) {
      const uint4 vector = load_eight(one, 0, Keys::column(k / 4, place));
      MLX_ANVIL_UNROLL
      for (int c = 0; c < 4; ++c) {
        const Pair<T> pair = pair_in<T>(vector, c);
        q.fragments[k + c][0] = transposed(fragment_of<T>(pair.x, pair.y), place);
      }
    }
    out.zero();
    softmax[0].clear();
    softmax[1].clear();
  }

  METAL_FUNC void load_keys(int begin) thread { keys.load(all_keys, begin, place); }
  METAL_FUNC void load_values(int begin) thread { values.load(all_values, begin, place); }

  // Processes the loaded block, which starts at `begin`, and prefetches the one at `next`.
  METAL_FUNC void attend(int begin,
                         int next,
                         const device uchar* mask,
                         constant AttentionParams& params) thread {
    RegTile<float, kKeys, kRows> scores;
    scores.zero();
    scores.mma(keys, q);
    load_keys(next);
    make_room(finish_scores(begin, mask, params, scores));
    RegTile<T, kKeys, kRows> weights;
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kKeyFragments; ++n) {
      float2 weight;
      MLX_ANVIL_UNROLL
      for (int e = 0; e < 2; ++e) {
        weight[e] = metal::fast::exp2(elements_of(scores.block(n, 0))[e] - softmax[e].base());
        softmax[e].sum += weight[e];
      }
      weights.fragments[n][0] = fragment_of<T>(weight);
    }
    out.mma(values, weights);
    load_values(next);
  }

  METAL_FUNC void scale(float2 factors) thread {
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kOutFragments; ++f) {
      out.fragments[f][0] = fragment_of<float>(elements_of(out.block(f, 0)) * factors);
    }
  }

  // Writes the lane's elements of row place.column + e, which starts at `row`.
  template <typename U>
  METAL_FUNC void store(int e, device U* row, int columns) const thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < Values::kVectors; ++i) {
      float x[8];
      MLX_ANVIL_UNROLL
      for (int c = 0; c < 8; ++c) {
        x[c] = elements_of(out.block(8 * i + c, 0))[e];
      }
      const int column = Values::column(i, place);
      MLX_ANVIL_UNROLL
      for (int c = 0; c < 8; c += Pack<U>::kSize) {
        if (rows_are_vectors) {
          if (column < columns) {
            Pack<U>::store(row + column + c, x + c);
          }
          continue;
        }
        MLX_ANVIL_UNROLL
        for (int j = c; j < c + Pack<U>::kSize; ++j) {
          if (column + j < columns) {
            row[column + j] = static_cast<U>(x[j]);
          }
        }
      }
    }
  }

 private:
  // Finishes the scores of the block at `begin`. Returns the lane's maximum of both rows.
  METAL_FUNC float2 finish_scores(int begin,
                                  const device uchar* mask,
                                  constant AttentionParams& params,
                                  thread RegTile<float, kKeys, kRows>& scores) const thread {
    const bool all = begin + kKeys <= all_keys.rows &&
                     sees_all(params, 0, params.q_len - 1, begin, begin + kKeys);
    float2 highest = float2(-INFINITY);
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kKeyFragments; ++n) {
      const int key = begin + 8 * n + place.row;
      MLX_ANVIL_UNROLL
      for (int e = 0; e < 2; ++e) {
        float score = CappedScore<T>(params, scores.fragments[n][0].thread_elements()[e]).score;
        if (!all && (key >= all_keys.rows || !sees(params, at[e].query, key))) {
          score = -INFINITY;
        } else if (has_bool_mask || has_additive_mask) {
          score = mask_of<T>(mask, params, at[e].batch, at[e].head).apply(score, at[e].query, key);
        }
        scores.fragments[n][0].thread_elements()[e] = score;
        highest[e] = metal::fmax(highest[e], score);
      }
    }
    return highest;
  }

  // Rescales before scores are added whose maximum in this lane is `highest`.
  METAL_FUNC void make_room(float2 highest) thread {
    if (!metal::simd_any(highest.x > softmax[0].highest + kHeadroom ||
                         highest.y > softmax[1].highest + kHeadroom)) {
      return;
    }
    float2 factors;
    MLX_ANVIL_UNROLL
    for (int e = 0; e < 2; ++e) {
      factors[e] = softmax[e].begin_piece(column_max(highest[e]));
    }
    scale(factors);
  }
};

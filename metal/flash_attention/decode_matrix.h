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
#include "metal/common/tile.h"
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

template <typename T, int kDim, int kKeys>
struct DecodeMatrixRows {
  static_assert(sizeof(T) == 2, "eight elements are 16 bytes");
  enum {
    kKeyFragments = kKeys / 8,
    kHeadVectors = kDim / 32,   // vectors per key in each of the four lanes that share it
    kValueVectors = kDim / 64,  // likewise per value and eight lanes
    kOutFragments = kDim / 8,
    kRows = 8,
  };

  FragmentPlace place;
  Rows<T> all_keys;    // keys of this part
  Rows<T> all_values;  // values of this part
  DecodeRow at[2];     // rows place.column and place.column + 1
  OnlineSoftmax softmax[2];
  Fragment<T> q[kHeadVectors][4];      // columns x rows
  Fragment<float> out[kOutFragments];  // columns x rows: see value_column
  // The next block, prefetched while the current one is processed.
  uint4 keys[kKeyFragments][kHeadVectors];        // key place.row of each fragment
  uint4 values[kKeyFragments][2][kValueVectors];  // keys place.column and place.column + 1

  // `query` is row place.row.
  METAL_FUNC void begin(const device T* query, constant AttentionParams& params) thread {
    const Rows<T> one = {query, 0, params.q_strides[3], 1, params.head_dim};
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kHeadVectors; ++i) {
      const uint4 vector = load_eight(one, 0, head_column(i));
      MLX_ANVIL_UNROLL
      for (int c = 0; c < 4; ++c) {
        q[i][c] = transposed(pair_of(vector, c), place);
      }
    }
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kOutFragments; ++f) {
      out[f] = fragment_of<float>(0.0f, 0.0f);
    }
    softmax[0].clear();
    softmax[1].clear();
  }

  METAL_FUNC void load_keys(int begin) thread {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kKeyFragments; ++n) {
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kHeadVectors; ++i) {
        keys[n][i] = load_eight(all_keys, begin + 8 * n + place.row, head_column(i));
      }
    }
  }

  METAL_FUNC void load_values(int begin) thread {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kKeyFragments; ++n) {
      MLX_ANVIL_UNROLL
      for (int e = 0; e < 2; ++e) {
        MLX_ANVIL_UNROLL
        for (int i = 0; i < kValueVectors; ++i) {
          values[n][e][i] =
              load_eight(all_values, begin + 8 * n + place.column + e, value_column(i));
        }
      }
    }
  }

  // Processes the loaded block, which starts at `begin`, and prefetches the one at `next`.
  METAL_FUNC void attend(int begin,
                         int next,
                         const device uchar* mask,
                         constant AttentionParams& params) thread {
    Fragment<float> scores[kKeyFragments];
    multiply_keys(scores);
    load_keys(next);
    make_room(finish_scores(begin, mask, params, scores));
    Fragment<T> weights[kKeyFragments];
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kKeyFragments; ++n) {
      float2 weight;
      MLX_ANVIL_UNROLL
      for (int e = 0; e < 2; ++e) {
        weight[e] = metal::fast::exp2(scores[n].thread_elements()[e] - softmax[e].base());
        softmax[e].sum += weight[e];
      }
      weights[n] = fragment_of<T>(weight);
    }
    multiply_values(weights);
    load_values(next);
  }

  METAL_FUNC void scale(float2 factors) thread {
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kOutFragments; ++f) {
      out[f] = fragment_of<float>(elements_of(out[f]) * factors);
    }
  }

  // Writes the lane's elements of row place.column + e, which starts at `row`.
  template <typename U>
  METAL_FUNC void store(int e, device U* row, int columns) const thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kValueVectors; ++i) {
      float x[8];
      MLX_ANVIL_UNROLL
      for (int c = 0; c < 8; ++c) {
        x[c] = elements_of(out[8 * i + c])[e];
      }
      const int column = value_column(i);
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
  // First of the lane's eight columns in vector i of a key, and of a value.
  METAL_FUNC int head_column(int i) const thread { return 32 * i + 4 * place.column; }
  METAL_FUNC int value_column(int i) const thread { return 64 * i + 8 * place.row; }

  METAL_FUNC static Fragment<T> pair_of(uint4 vector, int pair) {
    const Pair<T> elements = as_type<Pair<T>>(vector[pair]);
    return fragment_of<T>(elements.x, elements.y);
  }

  // scores = k q^T
  METAL_FUNC void multiply_keys(thread Fragment<float> (&scores)[kKeyFragments]) const thread {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kKeyFragments; ++n) {
      scores[n] = fragment_of<float>(0.0f, 0.0f);
    }
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kHeadVectors; ++i) {
      MLX_ANVIL_UNROLL
      for (int c = 0; c < 4; ++c) {
        MLX_ANVIL_UNROLL
        for (int n = 0; n < kKeyFragments; ++n) {
          metal::simdgroup_multiply_accumulate(scores[n], pair_of(keys[n][i], c), q[i][c],
                                               scores[n]);
        }
      }
    }
  }

  // Finishes the scores of the block at `begin`. Returns the lane's maximum of both rows.
  METAL_FUNC float2 finish_scores(int begin,
                                  const device uchar* mask,
                                  constant AttentionParams& params,
                                  thread Fragment<float> (&scores)[kKeyFragments]) const thread {
    const bool all = begin + kKeys <= all_keys.rows &&
                     sees_all(params, 0, params.q_len - 1, begin, begin + kKeys);
    float2 highest = float2(-INFINITY);
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kKeyFragments; ++n) {
      const int key = begin + 8 * n + place.row;
      MLX_ANVIL_UNROLL
      for (int e = 0; e < 2; ++e) {
        float score = CappedScore<T>(params, scores[n].thread_elements()[e]).score;
        if (!all && (key >= all_keys.rows || !sees(params, at[e].query, key))) {
          score = -INFINITY;
        } else if (has_bool_mask || has_additive_mask) {
          score = mask_of<T>(mask, params, at[e].batch, at[e].head).apply(score, at[e].query, key);
        }
        scores[n].thread_elements()[e] = score;
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

  // out += v^T weights
  METAL_FUNC void multiply_values(const thread Fragment<T> (&weights)[kKeyFragments]) thread {
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kOutFragments; ++f) {
      const int vector = f / 8, pair = f % 8 / 2;
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kKeyFragments; ++n) {
        const Pair<T> first = as_type<Pair<T>>(values[n][0][vector][pair]);
        const Pair<T> second = as_type<Pair<T>>(values[n][1][vector][pair]);
        const Fragment<T> v = fragment_of<T>(first[f % 2], second[f % 2]);
        metal::simdgroup_multiply_accumulate(out[f], v, weights[n], out[f]);
      }
    }
  }
};

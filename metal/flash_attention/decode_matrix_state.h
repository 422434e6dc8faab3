// What a simdgroup keeps of 8 rows of a decode with matrix products, wherever keys and values come
// from: softmax and output. Scores are keys x rows, the output is columns x rows.
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

template <typename T>
METAL_FUNC Pair<T> pair_in(uint4 eight, int pair) {
  return as_type<Pair<T>>(eight[pair]);
}

// Rescale only if weights could exceed 2^8, so that most blocks exchange nothing between lanes.
// 16-bit floats represent weights up to 2^8 with the same relative precision as those up to 1.
enum { kHeadroom = 8 };

template <typename T, int kDim, int kKeys>
struct DecodeMatrixState {
  static_assert(sizeof(T) == 2, "eight elements are 16 bytes");
  enum { kKeyFragments = kKeys / 8, kOutFragments = kDim / 8, kRows = 8, kVectors = kDim / 64 };
  using Scores = RegTile<float, kKeys, kRows>;

  FragmentPlace place;
  int end;  // of the keys of this part
  RaggedLengths lengths;
  DecodeRow at[2];  // rows place.column and place.column + 1
  OnlineSoftmax softmax[2];
  RegTile<float, kDim, kRows> out;  // fragment f has column f % 8 of each lane's eight

  // First of the lane's eight columns of the output in vector i.
  METAL_FUNC int first_column(int i) const thread { return 64 * i + 8 * place.row; }

  METAL_FUNC void clear() thread {
    out.zero();
    softmax[0].clear();
    softmax[1].clear();
  }

  // Weights of the lane's rows for key place.row of fragment n. Adds them to the sums.
  METAL_FUNC float2 weights(const thread Scores& scores, int n) thread {
    float2 weight;
    MLX_ANVIL_UNROLL
    for (int e = 0; e < 2; ++e) {
      weight[e] = metal::fast::exp2(elements_of(scores.block(n, 0))[e] - softmax[e].base());
      softmax[e].sum += weight[e];
    }
    return weight;
  }

  // Finishes the scores of the block at `begin`. Returns the lane's maximum of both rows.
  METAL_FUNC float2 finish_scores(int begin,
                                  const device uchar* mask,
                                  constant AttentionParams& params,
                                  thread Scores& scores) const thread {
    const bool all = begin + kKeys <= end &&
                     sees_all(params, 0, params.q_len - 1, begin, begin + kKeys, lengths);
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kKeyFragments; ++n) {
      MLX_ANVIL_UNROLL
      for (int e = 0; e < 2; ++e) {
        const float score = scores.fragments[n][0].thread_elements()[e];
        scores.fragments[n][0].thread_elements()[e] = CappedScore<T>(params, score).score;
      }
    }
    if (!all || has_bool_mask || has_additive_mask) {
      hide_scores(begin, all, mask, params, scores);
    }
    float2 highest = float2(-INFINITY);
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kKeyFragments; ++n) {
      highest = metal::fmax(highest, elements_of(scores.block(n, 0)));
    }
    return highest;
  }

  // Applies the mask, and hides what rows do not see unless they see all.
  METAL_FUNC void hide_scores(int begin,
                              bool all,
                              const device uchar* mask,
                              constant AttentionParams& params,
                              thread Scores& scores) const thread {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kKeyFragments; ++n) {
      const int key = begin + 8 * n + place.row;
      MLX_ANVIL_UNROLL
      for (int e = 0; e < 2; ++e) {
        float score = scores.fragments[n][0].thread_elements()[e];
        if (!all && (key >= end || !sees(params, at[e].query, key, lengths))) {
          score = -INFINITY;
        } else if (has_bool_mask || has_additive_mask) {
          score = mask_of<T>(mask, params, at[e].batch, at[e].head)
                      .apply(score, at[e].query, lengths.first_key() + key);
        }
        scores.fragments[n][0].thread_elements()[e] = score;
      }
    }
  }

  // True if scores whose maximum in this lane is `highest` call for make_room.
  METAL_FUNC bool needs_room(float2 highest) const thread {
    return metal::simd_any(highest.x > softmax[0].highest + kHeadroom ||
                           highest.y > softmax[1].highest + kHeadroom);
  }

  // Raises the maximum of both rows. Returns the factors of what was summed before.
  METAL_FUNC float2 make_room(float2 highest) thread {
    float2 factors;
    MLX_ANVIL_UNROLL
    for (int e = 0; e < 2; ++e) {
      factors[e] = softmax[e].begin_piece(column_max(highest[e]));
    }
    return factors;
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
    for (int i = 0; i < kVectors; ++i) {
      float x[8];
      MLX_ANVIL_UNROLL
      for (int c = 0; c < 8; ++c) {
        x[c] = elements_of(out.block(8 * i + c, 0))[e];
      }
      const int column = first_column(i);
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
};

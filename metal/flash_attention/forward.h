// The rows of the attention forward that one simdgroup computes.
#pragma once

#include "metal/common/online_softmax.h"
#include "metal/common/tile.h"
#include "metal/flash_attention/scores.h"

// kRowFragments * 8 query rows: q, the running softmax and the accumulated output. For each tile of
// keys and values, attend() does:
//   S = q k^T                                      8x8 fragments, float32 accumulation
//   S = softcap, mask and band applied
//   m' = max(m, rowmax(S)); factor = 2^(m - m')
//   P = 2^(S - m'); sum = sum * factor + rowsum(P)
//   out = out * factor + P v
template <typename T, int kHeadDim, int kValueDim, int kRowFragments, int kKeys, bool kKeepsQ>
struct ForwardRows {
  enum {
    kKeyStride = TileRow<T, kHeadDim>::kStride,
    kValueStride = TileRow<T, kValueDim>::kStride,
    kKeyFragments = kKeys / 8,
    kHeadFragments = kHeadDim / 8,
    kValueFragments = kValueDim / 8,
    kLoadsOneByOne = sizeof(T) == 4 || kHeadDim > 192,  // saves registers
  };

  FragmentPlace place;  // of this lane
  int first;            // query of row 0
  Rows<T> queries;      // all queries of the head
  Fragment<T> q[kRowFragments][kKeepsQ ? int(kHeadFragments) : 1];
  Fragment<float> out[kRowFragments][kValueFragments];
  OnlineSoftmax softmax[kRowFragments];

  METAL_FUNC int query(int row_fragment) const thread {
    return first + 8 * row_fragment + place.row;
  }

  METAL_FUNC Fragment<T> load_query(int i, int d) const thread {
    const Pair<T> pair = load_pair(queries, query(i), 8 * d + place.column, rows_are_vectors);
    return fragment_of<T>(pair.x, pair.y);
  }

  METAL_FUNC void begin() thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      softmax[i].clear();
      MLX_ANVIL_UNROLL
      for (int d = 0; d < kHeadFragments; ++d) {
        if (kKeepsQ) {
          q[i][d] = load_query(i, d);
        }
      }
      MLX_ANVIL_UNROLL
      for (int d = 0; d < kValueFragments; ++d) {
        out[i][d] = fragment_of<float>(0.0f, 0.0f);
      }
    }
  }

  // Adds the tile of keys that starts at `begin`.
  METAL_FUNC void attend(const threadgroup T* keys,
                         const threadgroup T* values,
                         int begin,
                         HeadMask<T> mask,
                         constant AttentionParams& params) thread {
    Fragment<float> scores[kRowFragments][kKeyFragments];
    multiply_keys(keys, scores);
    const int last = first + 8 * kRowFragments - 1;
    const bool all = sees_all(params, first, last, begin, begin + kKeys);
    cap_and_mask(begin, mask, params, scores);
    // In most tiles every pair is visible. One branch per tile replaces one per element.
    if (!all) {
      hide_unseen(begin, params, scores);
    }

    Fragment<T> weights[kRowFragments][kKeyFragments];
    float factors[kRowFragments];
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      float highest = -INFINITY;
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kKeyFragments; ++n) {
        const float2 score = elements_of(scores[i][n]);
        highest = metal::fmax(highest, metal::fmax(score.x, score.y));
      }
      factors[i] = softmax[i].begin_piece(row_max(highest));
      const float base = softmax[i].base();
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kKeyFragments; ++n) {
        const float2 score = elements_of(scores[i][n]);
        const float2 weight =
            float2(metal::fast::exp2(score.x - base), metal::fast::exp2(score.y - base));
        softmax[i].sum += weight.x + weight.y;
        weights[i][n] = fragment_of<T>(weight);
      }
    }
    shrink_out(factors);
    multiply_values(values, weights);
  }

  METAL_FUNC void cap_and_mask(
      int begin,
      HeadMask<T> mask,
      constant AttentionParams& params,
      thread Fragment<float> (&scores)[kRowFragments][kKeyFragments]) const thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kKeyFragments; ++n) {
        MLX_ANVIL_UNROLL
        for (int j = 0; j < 2; ++j) {
          const int key = begin + 8 * n + place.column + j;
          float score = CappedScore<T>(params, scores[i][n].thread_elements()[j]).score;
          if ((has_bool_mask || has_additive_mask) && query(i) < params.q_len &&
              key < params.kv_len) {
            score = mask.apply(score, query(i), key);
          }
          scores[i][n].thread_elements()[j] = score;
        }
      }
    }
  }

  METAL_FUNC void hide_unseen(
      int begin,
      constant AttentionParams& params,
      thread Fragment<float> (&scores)[kRowFragments][kKeyFragments]) const thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kKeyFragments; ++n) {
        MLX_ANVIL_UNROLL
        for (int j = 0; j < 2; ++j) {
          const bool seen = sees(params, query(i), begin + 8 * n + place.column + j);
          const float score = scores[i][n].thread_elements()[j];
          scores[i][n].thread_elements()[j] = seen ? score : -INFINITY;
        }
      }
    }
  }

  // Most blocks of keys do not raise the maximum of any row, and skip the rescaling.
  METAL_FUNC void shrink_out(const thread float (&factors)[kRowFragments]) thread {
    bool shrinks = false;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      shrinks = shrinks || factors[i] != 1.0f;
    }
    if (!metal::simd_any(shrinks)) {
      return;
    }
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      MLX_ANVIL_UNROLL
      for (int d = 0; d < kValueFragments; ++d) {
        out[i][d] = fragment_of<float>(elements_of(out[i][d]) * factors[i]);
      }
    }
  }

  // Keeps the compiler from hoisting loads: wide heads have no registers to spare.
  METAL_FUNC void keep_order() const thread {
    if (kHeadDim * sizeof(T) > 256) {
      metal::simdgroup_barrier(metal::mem_flags::mem_none);
    }
  }

  // scores = q k^T. All rows of the simdgroup use each fragment of k.
  METAL_FUNC void multiply_keys(
      const threadgroup T* keys,
      thread Fragment<float> (&scores)[kRowFragments][kKeyFragments]) thread {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kKeyFragments; ++n) {
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kRowFragments; ++i) {
        scores[i][n] = fragment_of<float>(0.0f, 0.0f);
      }
    }
    if (kKeepsQ) {
      MLX_ANVIL_UNROLL
      for (int d = 0; d < kHeadFragments; ++d) {
        keep_order();
        multiply_key_fragments(keys + 8 * d, d, scores);
      }
      return;
    }
    // This loop must not unroll: the compiler would hoist all loads of q, and use the registers
    // that reloading is meant to save.
#pragma clang loop unroll(disable)
    for (int d = 0; d < kHeadFragments; ++d) {
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kRowFragments; ++i) {
        q[i][0] = load_query(i, d);
      }
      multiply_key_fragments(keys + 8 * d, 0, scores);
    }
  }

  // Accumulates the products of eight columns, which start at `keys`.
  METAL_FUNC void multiply_key_fragments(
      const threadgroup T* keys,
      int d,
      thread Fragment<float> (&scores)[kRowFragments][kKeyFragments]) thread {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kKeyFragments; ++n) {
      const Fragment<T> k =
          load_transposed<T, bool(kLoadsOneByOne)>(keys + 8 * n * kKeyStride, kKeyStride, place);
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kRowFragments; ++i) {
        metal::simdgroup_multiply_accumulate(scores[i][n], q[i][d], k, scores[i][n]);
      }
    }
  }

  // out += weights v
  METAL_FUNC void multiply_values(
      const threadgroup T* values,
      thread Fragment<T> (&weights)[kRowFragments][kKeyFragments]) thread {
    MLX_ANVIL_UNROLL
    for (int d = 0; d < kValueFragments; ++d) {
      keep_order();
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kKeyFragments; ++n) {
        const Fragment<T> v = load_block(values + 8 * (n * kValueStride + d), kValueStride, place);
        MLX_ANVIL_UNROLL
        for (int i = 0; i < kRowFragments; ++i) {
          metal::simdgroup_multiply_accumulate(out[i][d], weights[i][n], v, out[i][d]);
        }
      }
    }
  }
};

// The rows of dQ that one SIMD group computes with products of four SIMD groups
// (metal/common/group_product.h).
#pragma once

#include "metal/flash_attention/backward_group.h"

// 16 queries, which are in registers. dP is computed during the exponentials of P, and the sum of
// dQ while the next tile starts. Between the start of a product and its wait there is no branch:
// ptxas would wait there.
template <typename T, int kHeadDim, int kValueDim, int kKeys>
struct QueryGroupRows {
  enum { kRows = 16, kRowFragments = kRows / 8 };
  using KeysAcross = TransposedSwizzledOperand<T, kKeys, kHeadDim>;
  using ValuesAcross = TransposedSwizzledOperand<T, kKeys, kValueDim>;
  using Keys = SwizzledOperand<T, kKeys, kHeadDim>;

  RaggedLengths lengths;
  FragmentPlace place;  // of this lane
  int first;            // query of row 0
  RegTile<T, kRows, kHeadDim> q;
  RegTile<T, kRows, kValueDim> d_out;
  RegTile<float, kRows, kHeadDim> gradient;
  RegTile<float, kRows, kKeys> p;
  RegTile<float, kRows, kKeys> d_scores;
  RegTile<T, kRows, kKeys> rounded;  // dS, which the product reads
  float lse[kRowFragments];          // negated, in units of log2
  float delta[kRowFragments];

  METAL_FUNC int query(int row_fragment) const thread {
    return first + 8 * row_fragment + place.row;
  }

  METAL_FUNC void begin(Rows<T> queries,
                        Rows<T> cotangents,
                        const device float* head_lse,
                        const device float* head_delta,
                        int q_len) thread {
    q.load(rows_from(queries, first), 0, place, rows_are_vectors, heads_fill_tile);
    d_out.load(rows_from(cotangents, first), 0, place, rows_are_vectors, heads_fill_tile);
    gradient.zero();
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      const int at = metal::min(query(i), q_len - 1);
      const bool exists = query(i) < q_len;
      lse[i] = negated_lse(head_lse[at], exists);
      delta[i] = exists ? head_delta[at] : 0.0f;
    }
  }

  // Takes a tile, whose keys start at `begin`. `kHides`: some pairs of it are hidden. `next_keys`
  // and `next_values` are copied.
  template <bool kHides, typename Tiles>
  METAL_FUNC void take(thread Tiles& tiles,
                       int begin,
                       Rows<T> next_keys,
                       Rows<T> next_values,
                       constant AttentionParams& params) thread {
    start_product(p, q, KeysAcross{tiles.first(), place}, false);
    start_product(d_scores, d_out, ValuesAcross{tiles.second(), place}, false);
    if (has_softcap) {  // both need the score
      wait_for_products<0>(p);
      wait_for_products<0>(d_scores);
      tiles.copy(next_keys, next_values);
      differentiate_capped<kHides>(begin, params);
    } else {
      wait_for_products<1>(p);
      tiles.copy(next_keys, next_values);
      weigh<kHides>(begin, params);
      compute_before_wait(any_weight(), tiles.memory);
      wait_for_products<0>(d_scores);
      scale_differences();
    }
    rounded = d_scores.template to<T>();
    start_product(gradient, rounded, Keys{tiles.first(), place}, true);
  }

  METAL_FUNC void finish() thread { wait_for_products<0>(gradient); }

 private:
  template <bool kHides>
  METAL_FUNC void weigh(int begin, constant AttentionParams& params) thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      const SeenKeys seen = seen_keys(params, query(i), lengths);
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kKeys / 8; ++n) {
        const float2 s = elements_of(p.fragments[i][n]);
        const int key = begin + 8 * n + place.column;
        const float x = weight_of(s.x, params.score_scale, lse[i]);
        const float y = weight_of(s.y, params.score_scale, lse[i]);
        p.fragments[i][n] = fragment_of<float>(!kHides || seen(key) ? x : 0.0f,
                                               !kHides || seen(key + 1) ? y : 0.0f);
      }
    }
  }

  // A number that depends on all weights, and is not negative.
  METAL_FUNC float any_weight() const thread {
    uint bits = 0;
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kRowFragments * kKeys / 8; ++f) {
      const uint2 pair = as_type<uint2>(elements_of(p.fragments[f % 2][f / 2]));
      bits |= pair.x | pair.y;
    }
    return as_type<float>(bits);
  }

  // dS = P (dP - delta)
  METAL_FUNC void scale_differences() thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kKeys / 8; ++n) {
        d_scores.fragments[i][n] = fragment_of<float>(
            elements_of(p.fragments[i][n]) * (elements_of(d_scores.fragments[i][n]) - delta[i]));
      }
    }
  }

  template <bool kHides>
  METAL_FUNC void differentiate_capped(int begin, constant AttentionParams& params) thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      const SeenKeys seen = seen_keys(params, query(i), lengths);
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kKeys / 8; ++n) {
        const float2 s = elements_of(p.fragments[i][n]), d = elements_of(d_scores.fragments[i][n]);
        const int key = begin + 8 * n + place.column;
        const float x = capped_gradient<T>(params, s.x, d.x, lse[i], delta[i]).y;
        const float y = capped_gradient<T>(params, s.y, d.y, lse[i], delta[i]).y;
        d_scores.fragments[i][n] = fragment_of<float>(!kHides || seen(key) ? x : 0.0f,
                                                      !kHides || seen(key + 1) ? y : 0.0f);
      }
    }
  }
};

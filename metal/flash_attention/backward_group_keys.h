// The rows of dK and dV that one SIMD group computes with products of four SIMD groups
// (metal/common/group_product.h), and the queries that pass.
#pragma once

#include "metal/flash_attention/backward_group.h"

// The queries of all heads of a group, in tiles; and of each tile, -lse and delta.
template <typename T, int kHeadDim, int kValueDim, int kQueries, int kThreads>
struct PassingQueries {
  static_assert(2 * kQueries <= kThreads, "each thread copies one number");
  enum { kSaved = 2 * 2 * kQueries };  // numbers in threadgroup memory

  RaggedLengths lengths;
  const device T* q;  // of the group's first head
  const device T* d_out;
  const device float* own;  // lse or delta, which this thread copies
  QueryRange range;         // that see a key
  PassingTiles<T, kQueries, kHeadDim, kValueDim, kThreads> tiles;
  threadgroup float* saved;
  int saved_place;
  int next;       // first query of the tile to copy
  int next_head;  // of the group
  float coming;   // what this thread copies
  bool coming_exists;

  METAL_FUNC const threadgroup float* lse() const thread {
    return saved + saved_place * 2 * kQueries;
  }
  METAL_FUNC const threadgroup float* delta() const thread { return lse() + kQueries; }

  // Call with all threads.
  METAL_FUNC void begin(constant AttentionBackwardParams& params) thread {
    saved_place = 1;
    next = range.begin;
    next_head = 0;
    load_next(params);
    store_saved();
    load_next(params);
  }

  // Call with all threads. Afterwards they see the next tile.
  METAL_FUNC void wait() thread {
    tiles.wait();
    saved_place = 1 - saved_place;
  }

  // Call with all threads after each wait().
  METAL_FUNC void copy_next(constant AttentionBackwardParams& params) thread {
    store_saved();
    load_next(params);
  }

 private:
  // Starts to copy the tile after the next. No branch.
  METAL_FUNC void load_next(constant AttentionBackwardParams& params) thread {
    constant AttentionParams& common = params.common;
    const bool exists = next_head < common.group;
    const int query_count = lengths.queries(common);
    const int head = exists ? next_head : 0, rows = exists ? query_count - next : 0;
    const Rows<T> queries = {q + head * common.q_strides[1] + next * common.q_strides[2],
                             common.q_strides[2], 1, rows, common.head_dim};
    const Rows<T> cotangents = {
        d_out + head * params.d_out_strides[1] + next * params.d_out_strides[2],
        params.d_out_strides[2], 1, rows, common.v_head_dim};
    tiles.copy(queries, cotangents);
    const int query = next + tiles.thread_index % kQueries;
    coming_exists = query < query_count;
    coming = own[static_cast<long>(head) * common.q_len + metal::min(query, query_count - 1)];
    next += kQueries;
    const bool wraps = next >= range.end;
    next = wraps ? range.begin : next;
    next_head += wraps;
  }

  // Stores what load_next() loaded last. Threads see it after the next wait().
  METAL_FUNC void store_saved() thread {
    const int index = tiles.thread_index;
    if (index < 2 * kQueries) {
      const float delta = coming_exists ? coming : 0.0f;
      saved[(1 - saved_place) * 2 * kQueries + index] =
          index < kQueries ? negated_lse(coming, coming_exists) : delta;
    }
  }
};

// 16 keys. dP^T is computed during the exponentials of P^T, the sum of dV during dS^T, and that of
// dK while the next tile starts. Between the start of a product and its wait there is no branch:
// ptxas would wait there.
template <typename T, int kHeadDim, int kValueDim, int kQueries, int kKeys>
struct KeyGroupRows {
  enum { kRows = 16, kRowFragments = kRows / 8, kColumnFragments = kQueries / 8 };
  using Keys = SwizzledRows<T, kKeys, kHeadDim>;
  using Values = SwizzledRows<T, kKeys, kValueDim>;
  using QueriesAcross = TransposedSwizzledOperand<T, kQueries, kHeadDim>;
  using CotangentsAcross = TransposedSwizzledOperand<T, kQueries, kValueDim>;
  using Queries = SwizzledOperand<T, kQueries, kHeadDim>;
  using Cotangents = SwizzledOperand<T, kQueries, kValueDim>;

  FragmentPlace place;  // of this lane
  int first;            // key of row 0
  int band_shift;       // of the sequence (ragged.h)
  Keys keys;
  Values values;
  RegTile<float, kRows, kHeadDim> key_gradient;
  RegTile<float, kRows, kValueDim> value_gradient;
  RegTile<float, kRows, kQueries> p;
  RegTile<float, kRows, kQueries> d_scores;
  RegTile<T, kRows, kQueries> weights;  // P and dS rounded, which products read
  RegTile<T, kRows, kQueries> rounded;

  // Takes a tile, whose queries start at `begin`. `kHides`: some pairs of it are hidden.
  template <bool kHides, typename Passing>
  METAL_FUNC void take(thread Passing& passing,
                       int begin,
                       constant AttentionBackwardParams& params) thread {
    const threadgroup T* const queries = passing.tiles.first();
    const threadgroup T* const cotangents = passing.tiles.second();
    start_product(p, keys, QueriesAcross{queries, place}, false);
    start_product(d_scores, values, CotangentsAcross{cotangents, place}, false);
    if (has_softcap) {  // both need the score
      wait_for_products<0>(p);
      wait_for_products<0>(d_scores);
      passing.copy_next(params);
      weigh_capped<kHides>(passing.lse(), passing.delta(), begin, params.common);
      weights = p.template to<T>();
      start_product(value_gradient, weights, Cotangents{cotangents, place}, true);
    } else {
      wait_for_products<1>(p);
      weigh<kHides>(passing.lse(), begin, params.common);
      weights = p.template to<T>();
      start_product(value_gradient, weights, Cotangents{cotangents, place}, true);
      passing.copy_next(params);
      wait_for_products<1>(d_scores);
      scale_differences(passing.delta());
    }
    rounded = d_scores.template to<T>();
    start_product(key_gradient, rounded, Queries{queries, place}, true);
    wait_for_products<1>(value_gradient);  // frees the registers of `weights`
  }

  METAL_FUNC void finish() thread {
    wait_for_products<0>(key_gradient);
    wait_for_products<0>(value_gradient);
  }

 private:
  // P of key `first` + 8 i + place.row, if the pair is visible.
  template <bool kHides>
  METAL_FUNC float2
  visible(constant AttentionParams& params, int i, int n, int begin, float2 weight) const thread {
    if (!kHides) {
      return weight;
    }
    const int from =
        first + 8 * i + place.row - params.band_high - band_shift;  // the first query that sees it
    const uint span = uint(params.band_high - params.band_low);
    const int query = begin + 8 * n + place.column - from;
    return float2(uint(query) <= span ? weight.x : 0.0f, uint(query + 1) <= span ? weight.y : 0.0f);
  }

  METAL_FUNC float2 pair_at(const threadgroup float* saved, int n) const thread {
    return *reinterpret_cast<const threadgroup float2*>(saved + (8 * n + place.column));
  }

  template <bool kHides>
  METAL_FUNC void weigh(const threadgroup float* lse,
                        int begin,
                        constant AttentionParams& params) thread {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kColumnFragments; ++n) {
      const float2 negated = pair_at(lse, n);
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kRowFragments; ++i) {
        const float2 s = elements_of(p.fragments[i][n]);
        const float2 weight = float2(weight_of(s.x, params.score_scale, negated.x),
                                     weight_of(s.y, params.score_scale, negated.y));
        p.fragments[i][n] = fragment_of<float>(visible<kHides>(params, i, n, begin, weight));
      }
    }
  }

  // dS = P (dP - delta)
  METAL_FUNC void scale_differences(const threadgroup float* saved_delta) thread {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kColumnFragments; ++n) {
      const float2 delta = pair_at(saved_delta, n);
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kRowFragments; ++i) {
        d_scores.fragments[i][n] = fragment_of<float>(
            elements_of(p.fragments[i][n]) * (elements_of(d_scores.fragments[i][n]) - delta));
      }
    }
  }

  template <bool kHides>
  METAL_FUNC void weigh_capped(const threadgroup float* lse,
                               const threadgroup float* saved_delta,
                               int begin,
                               constant AttentionParams& params) thread {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kColumnFragments; ++n) {
      const float2 negated = pair_at(lse, n), delta = pair_at(saved_delta, n);
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kRowFragments; ++i) {
        const float2 s = elements_of(p.fragments[i][n]), d = elements_of(d_scores.fragments[i][n]);
        const float2 x = capped_gradient<T>(params, s.x, d.x, negated.x, delta.x);
        const float2 y = capped_gradient<T>(params, s.y, d.y, negated.y, delta.y);
        p.fragments[i][n] =
            fragment_of<float>(visible<kHides>(params, i, n, begin, float2(x.x, y.x)));
        d_scores.fragments[i][n] =
            fragment_of<float>(visible<kHides>(params, i, n, begin, float2(x.y, y.y)));
      }
    }
  }
};

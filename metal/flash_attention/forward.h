// Attention forward for many queries: a threadgroup takes the rows of four SIMD groups, and the
// keys that they see pass by, tile by tile.
//
//   for each tile of keys that some row sees:
//     S = Q K^T                     masked only where the tile meets the edge of the window
//     m' = max(m, rowmax S); P = 2^(S - m'); l = l 2^(m - m') + rowsum P
//     O = O 2^(m - m') + P V
//   out = O / l; lse = ln2 (m + log2 l)
#pragma once

#include "metal/flash_attention/scores.h"

constant bool store_lse [[function_constant(5)]];

// A row's largest score so far and its normaliser, the latter spread over the row's four lanes.
struct OnlineSoftmax {
  float max;
  float sum;

  // The sink counts as a key with a value of 0; one lane of the row adds it.
  void start(float sink, bool first_lane) {
    max = has_sinks ? sink * kLog2E : -INFINITY;
    sum = has_sinks && first_lane && sink != -INFINITY ? 1.0f : 0.0f;
  }

  // Takes in scores of which `highest` is the row's largest; gives what to subtract from them, and
  // what sums of earlier ones are worth now.
  float2 update(float highest) {
    const float next = metal::max(max, highest);
    const float base = next == -INFINITY ? 0.0f : next;  // nothing seen yet: -inf + inf is NaN
    const float rescale = metal::fast::exp2(max - base);
    max = next;
    sum *= rescale;
    return float2(base, rescale);
  }
};

template <typename T, int kHeadDim, int kVHeadDim, int kKeys, int kFragmentRows>
struct AttentionForward {
  using KTile = SharedTile<T, kKeys, kHeadDim>;
  using VTile = SharedTile<T, kKeys, kVHeadDim>;
  enum {
    kRows = 8 * kFragmentRows,  // of a SIMD group
    kGroupRows = kSimdgroups * kRows,
    kHeadFragments = kHeadDim / 8,
    kVFragments = kVHeadDim / 8,
    kKeyFragments = kKeys / 8
  };

  constant AttentionParams& params;
  FragmentPlace place;
  int row;  // the SIMD group's first
  Fragment<T> q[kFragmentRows][kHeadFragments];
  Fragment<float> s[kFragmentRows][kKeyFragments];
  Fragment<float> out[kFragmentRows][kVFragments];
  OnlineSoftmax softmax[kFragmentRows];

  AttentionForward(constant AttentionParams& params, FragmentPlace place, int row)
      : params(params), place(place), row(row) {}

  void start(DeviceMatrix<T> queries, float sink) {
    MLX_ANVIL_UNROLL
    for (int r = 0; r < kFragmentRows; ++r) {
      MLX_ANVIL_UNROLL
      for (int d = 0; d < kHeadFragments; ++d) {
        q[r][d] = load_fragment(queries, row + 8 * r, 8 * d, place);
      }
      MLX_ANVIL_UNROLL
      for (int d = 0; d < kVFragments; ++d) {
        out[r][d] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
      softmax[r].start(sink, place.column == 0);
    }
  }

  void multiply_keys(const threadgroup T* k_tile) {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kKeyFragments; ++n) {
      MLX_ANVIL_UNROLL
      for (int r = 0; r < kFragmentRows; ++r) {
        s[r][n] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
      MLX_ANVIL_UNROLL
      for (int d = 0; d < kHeadFragments; ++d) {
        const Fragment<T> k = KTile::transposed(k_tile, 8 * n, 8 * d);
        MLX_ANVIL_UNROLL
        for (int r = 0; r < kFragmentRows; ++r) {
          metal::simdgroup_multiply_accumulate(s[r][n], q[r][d], k, s[r][n]);
        }
      }
    }
  }

  // Products become scores; `edge`: some of the tile's pairs lie outside the window.
  void finish_scores(thread const MaskView<T>& mask, int key, bool edge) {
    MLX_ANVIL_UNROLL
    for (int r = 0; r < kFragmentRows; ++r) {
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kKeyFragments; ++n) {
        MLX_ANVIL_UNROLL
        for (int e = 0; e < 2; ++e) {
          const float product = elements_of(s[r][n])[e];
          float score =
              unmasked_score(params, product, has_softcap ? capped(params, product) : 0.0f);
          if (edge || has_mask()) {
            score = masked_score(params, mask, row + 8 * r + place.row,
                                 key + 8 * n + place.column + e, score);
          }
          elements_of(s[r][n])[e] = score;
        }
      }
    }
  }

  void take_exponentials() {
    MLX_ANVIL_UNROLL
    for (int r = 0; r < kFragmentRows; ++r) {
      float highest = -INFINITY;
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kKeyFragments; ++n) {
        const float2 pair = elements_of(s[r][n]);
        highest = metal::max(highest, metal::max(pair.x, pair.y));
      }
      const float2 base_and_rescale = softmax[r].update(row_max(highest));
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kKeyFragments; ++n) {
        const float2 p = metal::fast::exp2(elements_of(s[r][n]) - base_and_rescale.x);
        softmax[r].sum += p.x + p.y;
        elements_of(s[r][n]) = p;
      }
      MLX_ANVIL_UNROLL
      for (int d = 0; d < kVFragments; ++d) {
        elements_of(out[r][d]) *= base_and_rescale.y;
      }
    }
  }

  void add_values(const threadgroup T* v_tile) {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kKeyFragments; ++n) {
      Fragment<T> p[kFragmentRows];
      MLX_ANVIL_UNROLL
      for (int r = 0; r < kFragmentRows; ++r) {
        p[r] = converted<T>(s[r][n]);
      }
      MLX_ANVIL_UNROLL
      for (int d = 0; d < kVFragments; ++d) {
        const Fragment<T> v = VTile::fragment(v_tile, 8 * n, 8 * d);
        MLX_ANVIL_UNROLL
        for (int r = 0; r < kFragmentRows; ++r) {
          metal::simdgroup_multiply_accumulate(out[r][d], p[r], v, out[r][d]);
        }
      }
    }
  }

  // `to` and `lse` of this batch and head.
  void store(device T* to, device float* lse) {
    MLX_ANVIL_UNROLL
    for (int r = 0; r < kFragmentRows; ++r) {
      const int query = row + 8 * r + place.row;
      const float sum = row_sum(softmax[r].sum);
      const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
      if (store_lse && place.column == 0 && query < params.q_len) {
        lse[query] = softmax[r].max * kLn2 + metal::precise::log(sum);
      }
      MLX_ANVIL_UNROLL
      for (int d = 0; d < kVFragments; ++d) {
        store_fragment(to, params.out_strides[2], params.q_len, params.v_head_dim, row + 8 * r,
                       8 * d, place, elements_of(out[r][d]) * factor, vector_loads);
      }
    }
  }
};

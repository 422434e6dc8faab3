// Attention backward, both halves by one loop. P is formed again from the saved log-sum-exp:
//
//   P = 2^(S - lse), dP = dO V^T, dS = P (dP - delta), delta = rowsum(dO O) - dlse
//   dQ = scale dS K,  dK = scale dS^T Q,  dV = P^T dO           (with dS times the cap's slope)
//
// A threadgroup keeps the rows of four SIMD groups, and tiles of the other side pass by. For dQ it
// keeps queries (Q, dO) and keys pass (K, V). For dK and dV it keeps keys (K, V), queries pass
// (Q, dO) from every head of the group, and all is transposed: S^T = K Q^T, dP^T = V dO^T. So the
// products that are added up read P and dS as they lie in registers, and nothing goes through
// memory but the tiles.
#pragma once

#include "metal/flash_attention/scores.h"

constant bool has_d_lse [[function_constant(6)]];
constant bool store_d_mask [[function_constant(7)]];

// What the probability of a row is formed with. A row that sees nothing, and one that does not
// exist, has probabilities of 0.
struct SavedRow {
  float lse;  // in the log2 domain
  float delta;
};

inline SavedRow load_saved_row(
    const device float* lse, const device float* delta, long head_row, int query, int q_len) {
  SavedRow row = {INFINITY, 0.0f};
  if (query < q_len) {
    const float natural = lse[head_row + query];
    row.lse = natural == -INFINITY ? INFINITY : natural * kLog2E;
    row.delta = delta[head_row + query];
  }
  return row;
}

// kKeepsKeys: dK and dV; otherwise dQ. kHold: the kept rows stay in registers; otherwise (large
// heads) their fragments are read from device memory for every tile.
template <typename T,
          bool kKeepsKeys,
          int kHeadDim,
          int kVHeadDim,
          int kTileRows,
          int kFragmentRows,
          bool kHold>
struct AttentionBackward {
  using HeadTile = SharedTile<T, kTileRows, kHeadDim>;    // of k or q
  using ValueTile = SharedTile<T, kTileRows, kVHeadDim>;  // of v or d_out
  enum {
    kRows = 8 * kFragmentRows,
    kGroupRows = kSimdgroups * kRows,
    kHeadFragments = kHeadDim / 8,
    kVFragments = kVHeadDim / 8,
    kTileFragments = kTileRows / 8,
    kHeldHead = kHold ? kHeadFragments : 1,
    kHeldValue = kHold ? kVFragments : 1,
    kValueSums = kKeepsKeys ? kVFragments : 1
  };

  constant AttentionParams& params;
  FragmentPlace place;
  int row;                // the SIMD group's first
  DeviceMatrix<T> head;   // the kept rows of q or k
  DeviceMatrix<T> value;  // of d_out or v
  Fragment<T> held_head[kFragmentRows][kHeldHead];
  Fragment<T> held_value[kFragmentRows][kHeldValue];
  SavedRow saved[kFragmentRows];  // of the kept queries
  Fragment<float> p[kFragmentRows][kTileFragments];
  Fragment<float> d_scores[kFragmentRows][kTileFragments];
  Fragment<float> head_sum[kFragmentRows][kHeadFragments];  // dQ or dK, not yet scaled
  Fragment<float> value_sum[kFragmentRows][kValueSums];     // dV

  AttentionBackward(constant AttentionParams& params,
                    FragmentPlace place,
                    int row,
                    DeviceMatrix<T> head,
                    DeviceMatrix<T> value)
      : params(params), place(place), row(row), head(head), value(value) {
    MLX_ANVIL_UNROLL
    for (int r = 0; r < kFragmentRows; ++r) {
      MLX_ANVIL_UNROLL
      for (int d = 0; d < kHeadFragments; ++d) {
        head_sum[r][d] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
      MLX_ANVIL_UNROLL
      for (int d = 0; d < kValueSums; ++d) {
        value_sum[r][d] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
      if (kHold) {
        MLX_ANVIL_UNROLL
        for (int d = 0; d < kHeldHead; ++d) {
          held_head[r][d] = load_fragment(head, row + 8 * r, 8 * d, place);
        }
        MLX_ANVIL_UNROLL
        for (int d = 0; d < kHeldValue; ++d) {
          held_value[r][d] = load_fragment(value, row + 8 * r, 8 * d, place);
        }
      }
    }
  }

  // Products of the kept rows with those of a tile: P gets those of q and k, dS those of d_out and
  // v.
  void multiply(const threadgroup T* head_tile, const threadgroup T* value_tile) {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kTileFragments; ++n) {
      MLX_ANVIL_UNROLL
      for (int r = 0; r < kFragmentRows; ++r) {
        p[r][n] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        d_scores[r][n] = metal::make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      }
    }
    MLX_ANVIL_UNROLL
    for (int d = 0; d < kHeadFragments; ++d) {
      Fragment<T> kept[kFragmentRows];
      MLX_ANVIL_UNROLL
      for (int r = 0; r < kFragmentRows; ++r) {
        kept[r] =
            kHold ? held_head[r][kHold ? d : 0] : load_fragment(head, row + 8 * r, 8 * d, place);
      }
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kTileFragments; ++n) {
        const Fragment<T> other = HeadTile::transposed(head_tile, 8 * n, 8 * d);
        MLX_ANVIL_UNROLL
        for (int r = 0; r < kFragmentRows; ++r) {
          metal::simdgroup_multiply_accumulate(p[r][n], kept[r], other, p[r][n]);
        }
      }
    }
    MLX_ANVIL_UNROLL
    for (int d = 0; d < kVFragments; ++d) {
      Fragment<T> kept[kFragmentRows];
      MLX_ANVIL_UNROLL
      for (int r = 0; r < kFragmentRows; ++r) {
        kept[r] =
            kHold ? held_value[r][kHold ? d : 0] : load_fragment(value, row + 8 * r, 8 * d, place);
      }
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kTileFragments; ++n) {
        const Fragment<T> other = ValueTile::transposed(value_tile, 8 * n, 8 * d);
        MLX_ANVIL_UNROLL
        for (int r = 0; r < kFragmentRows; ++r) {
          metal::simdgroup_multiply_accumulate(d_scores[r][n], kept[r], other, d_scores[r][n]);
        }
      }
    }
  }

  // From products to P and dS. `tile`: the first row of the tile; `tile_rows`: what was saved for
  // it, where queries pass by. `edge`: some pairs lie outside the window. `d_mask`: of this batch
  // and head.
  void finish(thread const MaskView<T>& mask,
              const threadgroup SavedRow* tile_rows,
              int tile,
              bool edge,
              device float* d_mask) {
    MLX_ANVIL_UNROLL
    for (int r = 0; r < kFragmentRows; ++r) {
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kTileFragments; ++n) {
        MLX_ANVIL_UNROLL
        for (int e = 0; e < 2; ++e) {
          const int kept = row + 8 * r + place.row;
          const int column = 8 * n + place.column + e;
          const int query = kKeepsKeys ? tile + column : kept;
          const int key = kKeepsKeys ? kept : tile + column;
          SavedRow of_query = saved[r];
          if (kKeepsKeys) {
            of_query = tile_rows[column];
          }
          const float product = elements_of(p[r][n])[e];
          const float cap = has_softcap ? capped(params, product) : 0.0f;
          float score = unmasked_score(params, product, cap);
          if (edge || has_mask()) {
            score = masked_score(params, mask, query, key, score);
          }
          const float probability = metal::fast::exp2(score - of_query.lse);
          const float d_score = probability * (elements_of(d_scores[r][n])[e] - of_query.delta);
          if (store_d_mask && !kKeepsKeys && query < params.q_len && key < params.kv_len) {
            d_mask[static_cast<long>(query) * params.kv_len + key] = d_score;
          }
          elements_of(p[r][n])[e] = probability;
          elements_of(d_scores[r][n])[e] = has_softcap ? d_score * (1.0f - cap * cap) : d_score;
        }
      }
    }
  }

  // Adds what the tile contributes to the gradients of the kept rows.
  void accumulate(const threadgroup T* head_tile, const threadgroup T* value_tile) {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kTileFragments; ++n) {
      Fragment<T> weights[kFragmentRows];
      MLX_ANVIL_UNROLL
      for (int r = 0; r < kFragmentRows; ++r) {
        weights[r] = converted<T>(d_scores[r][n]);
      }
      MLX_ANVIL_UNROLL
      for (int d = 0; d < kHeadFragments; ++d) {
        const Fragment<T> other = HeadTile::fragment(head_tile, 8 * n, 8 * d);
        MLX_ANVIL_UNROLL
        for (int r = 0; r < kFragmentRows; ++r) {
          metal::simdgroup_multiply_accumulate(head_sum[r][d], weights[r], other, head_sum[r][d]);
        }
      }
      if (!kKeepsKeys) {
        continue;
      }
      MLX_ANVIL_UNROLL
      for (int r = 0; r < kFragmentRows; ++r) {
        weights[r] = converted<T>(p[r][n]);
      }
      MLX_ANVIL_UNROLL
      for (int d = 0; d < kValueSums; ++d) {
        const Fragment<T> other = ValueTile::fragment(value_tile, 8 * n, 8 * d);
        MLX_ANVIL_UNROLL
        for (int r = 0; r < kFragmentRows; ++r) {
          metal::simdgroup_multiply_accumulate(value_sum[r][d], weights[r], other, value_sum[r][d]);
        }
      }
    }
  }

  void store_head(device T* to, long row_stride) {
    MLX_ANVIL_UNROLL
    for (int r = 0; r < kFragmentRows; ++r) {
      MLX_ANVIL_UNROLL
      for (int d = 0; d < kHeadFragments; ++d) {
        store_fragment(to, row_stride, head.rows, head.columns, row + 8 * r, 8 * d, place,
                       elements_of(head_sum[r][d]) * params.scale, vector_loads);
      }
    }
  }

  void store_value(device T* to, long row_stride) {
    MLX_ANVIL_UNROLL
    for (int r = 0; r < kFragmentRows; ++r) {
      MLX_ANVIL_UNROLL
      for (int d = 0; d < kValueSums; ++d) {
        store_fragment(to, row_stride, value.rows, value.columns, row + 8 * r, 8 * d, place,
                       elements_of(value_sum[r][d]), vector_loads);
      }
    }
  }
};

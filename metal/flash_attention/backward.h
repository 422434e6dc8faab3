// The rows of attention's backward that one simdgroup computes. P is recomputed from the saved
// log-sum-exp:
//   P  = 2^(S - lse), dP = dO V^T, dS = P (dP - delta), delta = rowsum(dO O) - dlse
//   dQ = scale dS K,  dK = scale dS^T Q,  dV = P^T dO          (dS times the slope of the softcap)
//
// dQ keeps queries (Q, dO) and streams keys (K, V). dK and dV keep keys (K, V), stream queries (Q,
// dO) and compute transposed scores: S^T = K Q^T, dP^T = V dO^T. The accumulating products then
// take P and dS straight from registers; only the tiles pass through threadgroup memory. For each
// tile:
//   p        = kept x tile^T             KeptOperand::multiply (Q K^T, or K Q^T)
//   d_scores = kept x tile^T             KeptOperand::multiply (dO V^T, or V dO^T)
//   p -> P, d_scores -> dS               ScoreGradients::finish
//   gradient += dS x tile (P for dV)     GradientSum::add
#pragma once

#include "metal/common/tile.h"
#include "metal/flash_attention/scores.h"

constant bool has_d_lse [[function_constant(7)]];
constant bool stores_d_mask [[function_constant(8)]];

// Saved statistics of a query. A query that sees nothing, or is out of range, gets lse = inf, and
// so probabilities of 0.
struct SavedRow {
  float lse;  // in units of log2
  float delta;
};

METAL_FUNC SavedRow load_saved_row(const device float* lse,
                                   const device float* delta,
                                   int query,
                                   int q_len) {
  SavedRow row = {INFINITY, 0.0f};
  if (query < q_len) {
    const float natural = lse[query];
    row.lse = natural == -INFINITY ? INFINITY : natural * M_LOG2E_F;
    row.delta = delta[query];
  }
  return row;
}

// Saved rows of the passing queries. They are double-buffered: the next tile's rows load while the
// current tile is processed.
template <int kTileRows>
struct PassingSavedRows {
  const device float* lse;  // of the head
  const device float* delta;
  threadgroup SavedRow* tiles;
  int q_len;
  uint thread_index;
  SavedRow coming;

  METAL_FUNC void load(int begin) thread {
    if (thread_index < kTileRows) {
      coming = load_saved_row(lse, delta, begin + thread_index, q_len);
    }
  }
  // Other threads see the rows after a barrier.
  METAL_FUNC void store(int place) thread {
    if (thread_index < kTileRows) {
      tile(place)[thread_index] = coming;
    }
  }
  METAL_FUNC threadgroup SavedRow* tile(int place) const thread {
    return tiles + place * kTileRows;
  }
};

// Where kept rows stay while the others pass.
enum Keeping {
  kKeptNowhere,      // device memory, reloaded for each tile
  kKeptInRegisters,  // registers of the simdgroup that owns the rows
  kKeptInMemory,     // threadgroup memory
};

// Computes kept rows x tile^T: sums over the columns of the operand.
template <typename T, int kColumns, int kRowFragments, int kTileRows, Keeping kKeeping>
struct KeptOperand {
  enum { kFragments = kColumns / 8 };
  enum { kHeld = kKeeping == kKeptInRegisters ? int(kFragments) : 1 };
  enum { kStride = TileRow<T, kColumns>::kStride, kTileFragments = kTileRows / 8 };

  Rows<T> rows;
  const threadgroup T* in_memory;  // first row of the simdgroup, for kKeptInMemory
  Fragment<T> held[kRowFragments][kHeld];

  METAL_FUNC Fragment<T> load(int row, int d, FragmentPlace place) const thread {
    const Pair<T> pair = load_pair(rows, row + place.row, 8 * d + place.column, rows_are_vectors);
    return fragment_of<T>(pair.x, pair.y);
  }

  METAL_FUNC void begin(int first, FragmentPlace place) thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      MLX_ANVIL_UNROLL
      for (int d = 0; d < kHeld; ++d) {
        if (kKeeping == kKeptInRegisters) {
          held[i][d] = load(first + 8 * i, d, place);
        }
      }
    }
  }

  METAL_FUNC void multiply(const threadgroup T* tile,
                           int first,
                           FragmentPlace place,
                           thread Fragment<float> (&sums)[kRowFragments][kTileFragments]) thread {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kTileFragments; ++n) {
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kRowFragments; ++i) {
        sums[i][n] = fragment_of<float>(0.0f, 0.0f);
      }
    }
    if (kKeeping == kKeptNowhere) {
      // This loop must not unroll: unrolled, it would hold the registers that reloading saves.
      MLX_ANVIL_NO_UNROLL
      for (int d = 0; d < kFragments; ++d) {
        MLX_ANVIL_UNROLL
        for (int i = 0; i < kRowFragments; ++i) {
          held[i][0] = load(first + 8 * i, d, place);
        }
        multiply_fragments(tile + 8 * d, 0, place, sums);
      }
      return;
    }
    MLX_ANVIL_UNROLL
    for (int d = 0; d < kFragments; ++d) {
      if (kKeeping == kKeptInMemory) {
        MLX_ANVIL_UNROLL
        for (int i = 0; i < kRowFragments; ++i) {
          held[i][0] = load_block(in_memory + 8 * (i * kStride + d), kStride, place);
        }
      }
      multiply_fragments(tile + 8 * d, kKeeping == kKeptInMemory ? 0 : d, place, sums);
    }
  }

  // Accumulates held[..][d] times the eight columns of the tile that start at `columns`.
  METAL_FUNC void multiply_fragments(
      const threadgroup T* columns,
      int d,
      FragmentPlace place,
      thread Fragment<float> (&sums)[kRowFragments][kTileFragments]) thread {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kTileFragments; ++n) {
      const Fragment<T> other = load_transposed(columns + 8 * n * kStride, kStride, place);
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kRowFragments; ++i) {
        metal::simdgroup_multiply_accumulate(sums[i][n], held[i][d], other, sums[i][n]);
      }
    }
  }
};

// Gradient of the kept rows: accumulates weights x tile.
template <typename T, int kColumns, int kRowFragments, int kTileRows>
struct GradientSum {
  enum { kFragments = kColumns / 8, kStride = TileRow<T, kColumns>::kStride };
  enum { kTileFragments = kTileRows / 8 };

  Fragment<float> sum[kRowFragments][kFragments];

  METAL_FUNC void begin() thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      MLX_ANVIL_UNROLL
      for (int d = 0; d < kFragments; ++d) {
        sum[i][d] = fragment_of<float>(0.0f, 0.0f);
      }
    }
  }

  METAL_FUNC void add(thread Fragment<float> (&weights)[kRowFragments][kTileFragments],
                      const threadgroup T* tile,
                      FragmentPlace place) thread {
    MLX_ANVIL_UNROLL
    for (int n = 0; n < kTileFragments; ++n) {
      Fragment<T> narrow[kRowFragments];
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kRowFragments; ++i) {
        narrow[i] = fragment_of<T>(elements_of(weights[i][n]));
      }
      MLX_ANVIL_UNROLL
      for (int d = 0; d < kFragments; ++d) {
        const Fragment<T> other = load_block(tile + 8 * (n * kStride + d), kStride, place);
        MLX_ANVIL_UNROLL
        for (int i = 0; i < kRowFragments; ++i) {
          metal::simdgroup_multiply_accumulate(sum[i][d], narrow[i], other, sum[i][d]);
        }
      }
    }
  }

  // `to` points to row 0 of the head. Rows from `rows` on are not written.
  METAL_FUNC void store(device T* to,
                        long row_stride,
                        int first,
                        int rows,
                        int columns,
                        FragmentPlace place,
                        float factor) thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      const int row = first + 8 * i + place.row;
      MLX_ANVIL_UNROLL
      for (int d = 0; d < kFragments; ++d) {
        if (row < rows) {
          store_pair(to + row * row_stride, 8 * d + place.column, columns,
                     elements_of(sum[i][d]) * factor, rows_are_vectors);
        }
      }
    }
  }
};

// Transforms the products of a tile in place: `p` from q . k to P, `d_scores` from d_out . v to dS.
// With kKeepsKeys, fragment rows are keys and tile rows are queries; otherwise the reverse.
template <typename T, bool kKeepsKeys, int kRowFragments, int kTileRows>
struct ScoreGradients {
  enum { kTileFragments = kTileRows / 8 };

  Fragment<float> p[kRowFragments][kTileFragments];
  Fragment<float> d_scores[kRowFragments][kTileFragments];

  // For passes that only need P.
  METAL_FUNC void clear_d_scores() thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kTileFragments; ++n) {
        d_scores[i][n] = fragment_of<float>(0.0f, 0.0f);
      }
    }
  }

  // `saved` holds the kept queries, `saved_of_tile` the passing ones. `d_mask` belongs to this
  // batch and head.
  METAL_FUNC void finish(int first,
                         int tile,
                         FragmentPlace place,
                         bool all,
                         thread SavedRow (&saved)[kRowFragments],
                         const threadgroup SavedRow* saved_of_tile,
                         HeadMask<T> mask,
                         device float* d_mask,
                         constant AttentionParams& params) thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kTileFragments; ++n) {
        MLX_ANVIL_UNROLL
        for (int j = 0; j < 2; ++j) {
          const int query = query_of(i, n, j, first, tile, place);
          const int key = key_of(i, n, j, first, tile, place);
          const bool exists = query < params.q_len && key < params.kv_len;
          SavedRow row = saved[i];
          if (kKeepsKeys) {
            row = saved_of_tile[8 * n + place.column + j];
          }
          const CappedScore<T> capped(params, p[i][n].thread_elements()[j]);
          float score = capped.score;
          if ((has_bool_mask || has_additive_mask) && exists) {
            score = mask.apply(score, query, key);
          }
          const float weight = metal::fast::exp2(score - row.lse);
          const float gradient = weight * (d_scores[i][n].thread_elements()[j] - row.delta);
          if (stores_d_mask && !kKeepsKeys && exists) {
            d_mask[static_cast<long>(query) * params.kv_len + key] =
                all || sees(params, query, key) ? gradient : 0.0f;
          }
          p[i][n].thread_elements()[j] = weight;
          d_scores[i][n].thread_elements()[j] = gradient * capped.slope();
        }
      }
    }
    // In most tiles every pair is visible. One branch per tile replaces one per element.
    if (!all) {
      clear_unseen(first, tile, place, params);
    }
  }

 private:
  METAL_FUNC static int query_of(int i, int n, int j, int first, int tile, FragmentPlace place) {
    return kKeepsKeys ? tile + 8 * n + place.column + j : first + 8 * i + place.row;
  }
  METAL_FUNC static int key_of(int i, int n, int j, int first, int tile, FragmentPlace place) {
    return kKeepsKeys ? first + 8 * i + place.row : tile + 8 * n + place.column + j;
  }

  METAL_FUNC void clear_unseen(int first,
                               int tile,
                               FragmentPlace place,
                               constant AttentionParams& params) thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kTileFragments; ++n) {
        MLX_ANVIL_UNROLL
        for (int j = 0; j < 2; ++j) {
          const bool seen = sees(params, query_of(i, n, j, first, tile, place),
                                 key_of(i, n, j, first, tile, place));
          p[i][n].thread_elements()[j] = seen ? p[i][n].thread_elements()[j] : 0.0f;
          d_scores[i][n].thread_elements()[j] = seen ? d_scores[i][n].thread_elements()[j] : 0.0f;
        }
      }
    }
  }
};

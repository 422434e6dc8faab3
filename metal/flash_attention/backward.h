// The rows of both halves of attention's backward that one SIMD group computes. P is formed again
// from the saved log-sum-exp:
//
//   P = 2^(S - lse), dP = dO V^T, dS = P (dP - delta), delta = rowsum(dO O) - dlse
//   dQ = scale dS K,  dK = scale dS^T Q,  dV = P^T dO           (with dS times the cap's slope)
//
// For dQ, queries are kept (Q, dO) and keys pass (K, V). For dK and dV, keys are kept (K, V),
// queries pass (Q, dO), and all is transposed: S^T = K Q^T, dP^T = V dO^T. So the products that are
// added up read P and dS as they lie in registers, and nothing goes through memory but the tiles.
#pragma once

#include "metal/common/tile.h"
#include "metal/flash_attention/scores.h"

constant bool has_d_lse [[function_constant(7)]];
constant bool stores_d_mask [[function_constant(8)]];

// What the probabilities of a query are formed with. A query that sees nothing, and one that does
// not exist, has probabilities of 0.
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

// What is saved of the queries that pass, tile by tile: loaded while the tile before is computed
// with, in one of two places in turn.
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
  // Seen by others after a barrier.
  METAL_FUNC void store(int place) thread {
    if (thread_index < kTileRows) {
      tile(place)[thread_index] = coming;
    }
  }
  METAL_FUNC threadgroup SavedRow* tile(int place) const thread {
    return tiles + place * kTileRows;
  }
};

// Where kept rows are while others pass.
enum Keeping {
  kKeptNowhere,      // read again for each tile
  kKeptInRegisters,  // of the SIMD group that they are of
  kKeptInMemory,     // of the threadgroup
};

// Sums of products with the rows of one operand: fragments of `kept` by those of a tile, along the
// operand's columns.
template <typename T, int kColumns, int kRowFragments, int kTileRows, Keeping kKeeping>
struct KeptOperand {
  enum { kFragments = kColumns / 8 };
  enum { kHeld = kKeeping == kKeptInRegisters ? int(kFragments) : 1 };
  enum { kStride = TileRow<T, kColumns>::kStride, kTileFragments = kTileRows / 8 };

  Rows<T> rows;
  const threadgroup T* in_memory;  // the SIMD group's first row, where it is kept there
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
      // A loop in earnest: unrolled, it would hold as many registers as it means to save.
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

  // held[..][d] by the eight columns of the tile that begin there.
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

// A gradient of the kept rows: sums of weights by the rows of a tile.
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

  // `to`: row 0 of the head. Rows beyond `rows` are not written.
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

// From the products of a tile, in place: `p` from q . k to P, `d_scores` from d_out . v to dS.
// kKeepsKeys: rows are keys and the tile's are queries; otherwise the reverse.
template <typename T, bool kKeepsKeys, int kRowFragments, int kTileRows>
struct ScoreGradients {
  enum { kTileFragments = kTileRows / 8 };

  Fragment<float> p[kRowFragments][kTileFragments];
  Fragment<float> d_scores[kRowFragments][kTileFragments];

  // Where only P is wanted.
  METAL_FUNC void clear_d_scores() thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kTileFragments; ++n) {
        d_scores[i][n] = fragment_of<float>(0.0f, 0.0f);
      }
    }
  }

  // `saved`: of the kept queries; `saved_of_tile`: of those that pass. `d_mask`: of this batch and
  // head.
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
    // Most tiles have no pair that is not seen: one branch for all elements, not one for each.
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

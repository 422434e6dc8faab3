// The rows of attention's backward that one simdgroup computes. P is recomputed from the saved
// log-sum-exp:
//   P  = 2^(S - lse), dP = dO V^T, dS = P (dP - delta), delta = rowsum(dO O) - dlse
//   dQ = scale dS K,  dK = scale dS^T Q,  dV = P^T dO          (dS times the slope of the softcap)
//
// dQ keeps queries (Q, dO) and streams keys (K, V). On Apple's GPUs it also stores P and dS, which
// dK and dV are products of (stored_weights.h). Elsewhere dK and dV keep keys (K, V), stream
// queries (Q, dO) and compute transposed scores: S^T = K Q^T, dP^T = V dO^T. The accumulating
// products then take P and dS straight from registers; only the tiles pass through threadgroup
// memory. For each tile:
//   p = kept x tile^T                    KeptRows::multiply (Q K^T, or K Q^T)
//   d_scores = kept x tile^T             KeptRows::multiply (dO V^T, or V dO^T)
//   p = P, d_scores = dS                 RegTile::map of ScoreGradient
//   gradient += dS x tile (P for dV)     RegTile::mma
#pragma once

#include "metal/flash_attention/kept_rows.h"
#include "metal/flash_attention/ragged.h"

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
  const int at = metal::min(query, q_len - 1);
  const bool exists = query < q_len;
  const float natural = lse[at], found = delta[at];
  return {!exists || natural == -INFINITY ? INFINITY : natural * M_LOG2E_F, exists ? found : 0.0f};
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

// From the products q . k and d_out . v of a pair: P, and dS times the slope of the softcap. With
// kKeepsKeys, rows are keys, and columns are queries that count from first_passing; otherwise rows
// are queries, and columns are keys. kNear is as for MaskedScore.
template <typename T, bool kKeepsKeys, bool kNear>
struct ScoreGradient {
  bool all;                             // every query of the tile sees every key
  SavedRow saved;                       // of the row's query, if queries are kept
  const threadgroup SavedRow* passing;  // of the tile's queries, if keys are kept
  int first_passing;                    // of the tile
  HeadMask<T> mask;
  device float* d_mask;  // of this batch and head
  constant AttentionParams* params;
  RaggedLengths lengths;

  METAL_FUNC float2 operator()(int row, int column, float product, float d_weight) const thread {
    const int query = kKeepsKeys ? first_passing + column : row, key = kKeepsKeys ? row : column;
    const int queries = lengths.queries(*params), keys = lengths.keys(*params);
    const bool exists = query < queries && key < keys;
    SavedRow own = saved;
    if (kKeepsKeys) {
      own = passing[column];
    }
    const CappedScore<T> capped(*params, product);
    float score = capped.score;
    const bool has_mask = has_bool_mask || has_additive_mask;
    if (!kNear && has_mask && exists) {
      score = mask.apply(score, query, key);
    }
    if (kNear && has_mask) {
      const int near_query = metal::min(query, queries - 1);
      const int near_key = metal::min(key, keys - 1);
      const float masked =
          kKeepsKeys
              ? mask.apply_near(score, first_passing, near_key, near_query - first_passing, 0)
              : mask.apply_near(score, near_query, first_passing, 0, near_key - first_passing);
      score = exists ? masked : score;
    }
    const float weight = metal::fast::exp2(score - own.lse);
    const float gradient = weight * (d_weight - own.delta);
    if (stores_d_mask && !kKeepsKeys && exists) {
      d_mask[static_cast<long>(query) * params->kv_len + key] =
          all || sees(*params, query, key, lengths) ? gradient : 0.0f;
    }
    return float2(weight, gradient * capped.slope());
  }
};

// Zero for pairs outside the band.
template <bool kKeepsKeys>
struct VisibleWeight {
  constant AttentionParams* params;
  RaggedLengths lengths;

  METAL_FUNC float operator()(int row, int column, float weight) const thread {
    const bool seen =
        kKeepsKeys ? sees(*params, column, row, lengths) : sees(*params, row, column, lengths);
    return seen ? weight : 0.0f;
  }
};

// The same for P and dS of a query's pairs.
struct VisiblePair {
  SeenKeys seen;

  METAL_FUNC float2 operator()(int row, int column, float weight, float gradient) const thread {
    return seen(column) ? float2(weight, gradient) : float2(0.0f);
  }
};

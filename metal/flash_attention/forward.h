// The rows of the attention forward that one simdgroup computes.
#pragma once

#include "metal/common/online_softmax.h"
#include "metal/flash_attention/kept_rows.h"
#include "metal/flash_attention/ragged.h"

// Applies softcap and mask to the product of a query and a key. Pairs outside the operands get the
// mask of another pair: their scores are hidden later, or not used. Matrix units have larger tiles,
// which have more registers without kNear.
template <typename T, bool kNear>
struct MaskedScore {
  int first_key;  // of the tile
  bool folds;     // leaves the factor of the score to SoftmaxWeight
  HeadMask<T> mask;
  constant AttentionParams* params;
  RaggedLengths lengths;

  METAL_FUNC float operator()(int query, int key, float product) const thread {
    const float score = folds ? product : CappedScore<T>(*params, product).score;
    const bool has_mask = has_bool_mask || has_additive_mask;
    if (!kNear && has_mask && query < lengths.queries(*params) && key < lengths.keys(*params)) {
      return mask.apply(score, query, key);
    }
    if (kNear && has_mask) {
      return mask.apply_near(score, metal::min(query, lengths.queries(*params) - 1), first_key, 0,
                             metal::min(key, lengths.keys(*params) - 1) - first_key);
    }
    return score;
  }
};

struct VisibleScore {
  SeenKeys seen;

  METAL_FUNC float operator()(int, int key, float score) const thread {
    return seen(key) ? score : -INFINITY;
  }
};

// `folds`: the score is still without its factor `scale`.
struct SoftmaxWeight {
  float base;
  float scale;
  bool folds;

  METAL_FUNC float operator()(int, int, float score) const thread {
    return metal::fast::exp2(folds ? metal::fma(score, scale, -base) : score - base);
  }
};

// Rescales the accumulated output. Most tiles of keys do not raise the maximum of any row. Where
// there is much to rescale, it is skipped then.
template <typename Tile, int kRowFragments>
METAL_FUNC void scale_rows(thread Tile& out, const thread float (&factors)[kRowFragments]) {
  if (kRowFragments == 1) {
    out.scale_row(0, factors[0]);
    return;
  }
  bool changes = false;
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kRowFragments; ++i) {
    changes = changes || factors[i] != 1.0f;
  }
  if (!metal::simd_any(changes)) {
    return;
  }
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kRowFragments; ++i) {
    out.scale_row(i, factors[i]);
  }
}

// kRowFragments * 8 query rows: q, the running softmax and the accumulated output. For each tile of
// keys and values, attend() does:
//   S = q k^T                                      float32 accumulation
//   S = softcap, mask and band applied
//   m' = max(m, rowmax(S)); factor = 2^(m - m')
//   P = 2^(S - m'); sum = sum * factor + rowsum(P)
//   out = out * factor + P v
template <typename T, int kHeadDim, int kValueDim, int kRowFragments, int kKeys, Keeping kKeeping>
struct ForwardRows {
  enum { kRows = 8 * kRowFragments };
  enum {
    kKeyStride = TileRow<T, kHeadDim>::kStride,
    kValueStride = TileRow<T, kValueDim>::kStride
  };
  // Both save registers of wide heads.
  enum { kInOrder = kHeadDim * sizeof(T) > 256, kOneByOne = sizeof(T) == 4 || kHeadDim > 192 };
  using Keys = TransposedTile<T, kKeyStride, kInOrder && kKeeping != kKeptNowhere, bool(kOneByOne)>;
  using Values = SharedTile<T, kValueStride, bool(kInOrder)>;

  FragmentPlace place;  // of this lane
  int first;            // query of row 0
  KeptRows<T, kHeadDim, kRows, kKeys, kKeeping, Keys> q;
  RegTile<float, kRows, kValueDim> out;
  OnlineSoftmax softmax[kRowFragments];

  METAL_FUNC int query(int row_fragment) const thread {
    return first + 8 * row_fragment + place.row;
  }

  METAL_FUNC void begin(Rows<T> queries, float highest) thread {
    q.begin(queries, first, place);
    out.zero();
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      softmax[i].clear();
      softmax[i].highest = highest;
    }
  }

  // Adds the tile of keys that starts at `begin`.
  METAL_FUNC void attend(const threadgroup T* keys,
                         const threadgroup T* values,
                         int begin,
                         HeadMask<T> mask,
                         constant AttentionParams& params,
                         RaggedLengths lengths) thread {
    RegTile<float, kRows, kKeys> scores = q.multiply(keys);
    const int query = first + place.row, key = begin + place.column;
    // With large tiles, exp2's argument is one fma of the product. That needs a positive factor:
    // the largest product then has the largest score, and a hidden one's is no NaN.
    const bool folds = kRowFragments > 1 && !has_softcap && !has_additive_mask;
    const float scale = metal::max(metal::abs(params.score_scale), 0x1p-100f);
    if (folds && params.score_scale < 0.0f) {
      scores.scale(-1.0f);
    }
    scores.map(query, key,
               MaskedScore<T, kRowFragments == 1>{begin, folds, mask, &params, lengths});
    // In most tiles every pair is visible. Where there are many, one branch replaces their tests.
    if (kRowFragments * kKeys <= 32 ||
        !sees_all(params, first, first + kRows - 1, begin, begin + kKeys, lengths)) {
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kRowFragments; ++i) {
        scores.map_row(i, query, key, VisibleScore{seen_keys(params, query + 8 * i, lengths)});
      }
    }
    float factors[kRowFragments];
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      const float highest = scores.row_max(i);
      factors[i] = softmax[i].begin_piece(folds ? highest * scale : highest);
      scores.map_row(i, query, key, SoftmaxWeight{softmax[i].base(), scale, folds});
      softmax[i].sum = scores.row_sum(i, softmax[i].sum);
    }
    scale_rows(out, factors);
    const RegTile<T, kRows, kKeys> weights = scores.template to<T>();
    if (kInOrder) {
      out.mma_by_columns(weights, Values{values, place});
    } else {
      out.mma(weights, Values{values, place});
    }
  }
};

// The rows of the attention forward that one SIMD group computes with products of four SIMD groups
// (metal/common/group_product.h).
#pragma once

#include "metal/common/group_product.h"
#include "metal/flash_attention/forward.h"

// Applies the softcap. Without one, the factor of the score is left to SoftmaxWeight.
template <typename T>
struct UnmaskedScore {
  constant AttentionParams* params;

  METAL_FUNC float operator()(int, int, float product) const thread {
    return has_softcap ? CappedScore<T>(*params, product).score : product;
  }
};

// The places of tiles in threadgroup memory: two for keys and two for values. While a tile of keys
// is multiplied, so are the values of the tile before. The next ones come into the other places.
template <typename T, int kHeadDim, int kValueDim, int kKeys>
struct GroupPlaces {
  using KeyTile = SwizzledTile<T, kKeys, kHeadDim>;
  using ValueTile = SwizzledTile<T, kKeys, kValueDim>;

  threadgroup T* memory;
  int turn;  // place of the keys to multiply; the values of the tile before are in the other

  METAL_FUNC const threadgroup T* keys() const thread { return key_place(turn); }
  METAL_FUNC const threadgroup T* values_before() const thread { return value_place(1 - turn); }
  METAL_FUNC threadgroup T* free_keys() const thread { return key_place(1 - turn); }
  METAL_FUNC threadgroup T* free_values() const thread { return value_place(turn); }

  // Call with all threads. Afterwards they see the tiles that came, and the other places are free.
  METAL_FUNC void wait() thread {
    wait_for_tiles();
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    turn = 1 - turn;
  }

 private:
  METAL_FUNC threadgroup T* key_place(int place) const thread {
    return memory + place * KeyTile::kSize;
  }
  METAL_FUNC threadgroup T* value_place(int place) const thread {
    return memory + 2 * KeyTile::kSize + place * ValueTile::kSize;
  }
};

// Copies plain keys and values into the places.
template <typename T, int kHeadDim, int kValueDim, int kKeys, int kThreads>
struct GroupTiles : GroupPlaces<T, kHeadDim, kValueDim, kKeys> {
  using Base = GroupPlaces<T, kHeadDim, kValueDim, kKeys>;

  Rows<T> next_keys;  // from the next tile on
  Rows<T> next_values;
  uint thread_index;

  // Call with all threads. Copies the tile of keys that starts at `begin`, the first.
  METAL_FUNC void start(int begin) thread {
    next_keys = rows_from(next_keys, begin);
    next_values = rows_from(next_values, begin);
    this->turn = 1;
    copy_keys(true);
    end_copies();
    this->wait();
  }

  // Starts to copy values, and the keys of the tile after them if it `exists`. No branch.
  METAL_FUNC void copy_next(bool exists) thread {
    copy_keys(exists);
    Base::ValueTile::template start_copies<kThreads>(this->free_values(), next_values,
                                                     thread_index);
    advance<kKeys>(next_values, true);
    end_copies();
  }

 private:
  METAL_FUNC void copy_keys(bool exists) thread {
    next_keys.rows = exists ? next_keys.rows : 0;
    Base::KeyTile::template start_copies<kThreads>(this->free_keys(), next_keys, thread_index);
    advance<kKeys>(next_keys, true);
  }
};

// 16 query rows. The scores of a tile of keys are computed while the weights of the tile before are
// multiplied by its values. Between the start of a product and its wait there is no branch: ptxas
// would wait there.
template <typename T, int kHeadDim, int kValueDim, int kKeys>
struct ForwardGroupRows {
  enum { kRows = 16, kRowFragments = kRows / 8 };
  using Keys = TransposedSwizzledOperand<T, kKeys, kHeadDim>;
  using Values = SwizzledOperand<T, kKeys, kValueDim>;

  RaggedLengths lengths;
  FragmentPlace place;  // of this lane
  int first;            // query of row 0
  RegTile<T, kRows, kHeadDim> q;
  RegTile<float, kRows, kValueDim> out;
  RegTile<float, kRows, kKeys> scores;
  RegTile<T, kRows, kKeys> weights;  // of the last tile
  OnlineSoftmax softmax[kRowFragments];
  float factors[kRowFragments];

  METAL_FUNC int query(int row_fragment) const thread {
    return first + 8 * row_fragment + place.row;
  }

  METAL_FUNC void begin(Rows<T> queries, float highest, constant AttentionParams& params) thread {
    q.load(rows_from(queries, first), 0, place, rows_are_vectors, heads_fill_tile);
    if (!has_softcap && params.score_scale < 0.0f) {  // SoftmaxWeight takes a positive factor
      q.negate();
    }
    out.zero();
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      softmax[i].clear();
      softmax[i].highest = highest;
    }
  }

  // Takes the first tile, whose keys start at `begin`.
  template <typename Tiles>
  METAL_FUNC void start(thread Tiles& tiles,
                        int begin,
                        int end,
                        constant AttentionParams& params) thread {
    start_product(scores, q, Keys{tiles.keys(), place}, false);
    tiles.copy_next(begin + kKeys < end);
    wait_for_products<0>(scores);
    weigh<true>(begin, params);
    weights = scores.template to<T>();
  }

  // Adds the values of the tile before, and takes the tile whose keys start at `begin`. `kHides`:
  // some pairs of the tile are hidden.
  template <bool kHides, typename Tiles>
  METAL_FUNC void go_on(thread Tiles& tiles,
                        int begin,
                        int end,
                        constant AttentionParams& params) thread {
    start_product(scores, q, Keys{tiles.keys(), place}, false);
    start_product(out, weights, Values{tiles.values_before(), place}, true);
    tiles.copy_next(begin + kKeys < end);
    wait_for_products<1>(scores);
    weigh<kHides>(begin, params);
    compute_before_wait(metal::fmin(softmax[0].sum, softmax[1].sum), tiles.memory);
    wait_for_products<0>(out);
    scale_rows(out, factors);
    weights = scores.template to<T>();
  }

  // Adds the values of the last tile.
  METAL_FUNC void finish(const threadgroup T* values) thread {
    start_product(out, weights, Values{values, place}, true);
    wait_for_products<0>(out);
  }

 private:
  // scores = 2^(score - maximum)
  template <bool kHides>
  METAL_FUNC void weigh(int begin, constant AttentionParams& params) thread {
    const float scale = metal::max(metal::abs(params.score_scale), 0x1p-100f);
    const int row = first + place.row, key = begin + place.column;
    scores.map(row, key, UnmaskedScore<T>{&params});
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      if (kHides) {
        scores.map_row(i, row, key, VisibleScore{seen_keys(params, query(i), lengths)});
      }
      const float highest = scores.row_max(i);
      factors[i] = softmax[i].begin_piece(has_softcap ? highest : highest * scale);
      scores.map_row(i, row, key, SoftmaxWeight{softmax[i].base(), scale, !has_softcap});
      softmax[i].sum = scores.row_sum(i, softmax[i].sum);
    }
  }
};

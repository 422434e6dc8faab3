// The part of a decode that one simdgroup computes with matrix products: 8 query rows, for some of
// the keys.
//
// Keys and values go from device memory straight into operand registers, 16 bytes at a time. Scores
// are k q^T. A sum over columns may take them in any order, so the four pairs in a lane's 16 bytes
// of a key serve as its elements of four fragments. The output is accumulated as v^T p^T. Each of
// its fragments covers every eighth of 64 columns, so that a lane's elements come from its 16 bytes
// of two adjacent keys. The weights replace the scores in place, which is where the product needs
// p^T.
//
//   for each block of keys (attend):
//     scores = k q^T; start loading the next keys
//     softcap, mask, band; rescale if the maximum grows by more than kHeadroom
//     weights = 2^(scores - m); sum += weights
//     out += v^T weights; start loading the next values
#pragma once

#include "metal/flash_attention/decode_matrix_state.h"
#include "metal/flash_attention/pages.h"

// Keys or values in memory, and where the block to load next is if they are in pages. The table is
// looked up a block ahead, so that loads do not wait for it. If pages do not hold eights, each row
// looks its own page up.
template <typename T, int kKeys>
struct CacheBlocks {
  CacheRows<T> cache;
  long eights[kKeys / kKeysOfLookup];  // offsets of their first rows

  // `begin` is a multiple of 8.
  METAL_FUNC void look_up(int begin) thread {
    if (is_paged && pages_hold_eights) {
      MLX_ANVIL_UNROLL
      for (int n = 0; n < kKeys / kKeysOfLookup; ++n) {
        const int last = (cache.head.rows - 1) & -int(kKeysOfLookup);
        eights[n] = cache.offset(metal::min(begin + kKeysOfLookup * n, last));
      }
    }
  }

  // Loads from row `row` of the n-th eight of the block at `begin`. Reads zeros outside the cache.
  METAL_FUNC uint4 load(int begin, int n, int row, int column) const thread {
    const int first = begin + kKeysOfLookup * n, key = first + row;
    const thread Rows<T>& head = cache.head;
    if (!is_paged) {
      return load_eight(head, key, column);
    }
    if (pages_hold_eights) {
      const Rows<T> eight = {head.data + eights[n], head.row_stride, head.column_stride,
                             head.rows - first, head.columns};
      return load_eight(eight, row, column);
    }
    return key < head.rows ? load_eight(cache.row(key), 0, column) : uint4(0);
  }
};

// A block of keys in registers: kKeys x kDim, the left operand of k q^T. A lane has 16 bytes of
// every 32 columns; fragment k has pair k % 4 of them.
template <typename T, int kDim, int kKeys>
struct KeyVectors {
  using Element = T;
  enum { kColumnFragments = kDim / 8, kVectors = kDim / 32, kKeyFragments = kKeys / 8 };

  uint4 vectors[kKeyFragments][kVectors];  // of key place.row of each fragment

  // First of the lane's eight columns in vector i.
  METAL_FUNC static int column(int i, FragmentPlace place) { return 32 * i + 4 * place.column; }

  METAL_FUNC Fragment<T> block(int n, int k) const thread {
    const Pair<T> pair = pair_in<T>(vectors[n][k / 4], k % 4);
    return fragment_of<T>(pair.x, pair.y);
  }

  METAL_FUNC void load(const thread CacheBlocks<T, kKeys>& keys,
                       int begin,
                       FragmentPlace place) thread {
    MLX_ANVIL_UNROLL
    for (int v = 0; v < kKeyFragments * kVectors; ++v) {
      const int n = v / kVectors, i = v % kVectors;
      vectors[n][i] = keys.load(begin, n, place.row, column(i, place));
    }
  }
};

// A block of values in registers, transposed: kDim x kKeys, the left operand of v^T p^T. A lane has
// 16 bytes of every 64 columns of two keys; fragment f has element f % 8 of both.
template <typename T, int kDim, int kKeys>
struct ValueVectors {
  using Element = T;
  enum { kColumnFragments = kKeys / 8, kVectors = kDim / 64 };

  uint4 vectors[kColumnFragments][2][kVectors];  // of keys place.column and place.column + 1

  // First of the lane's eight columns in vector i.
  METAL_FUNC static int column(int i, FragmentPlace place) { return 64 * i + 8 * place.row; }

  METAL_FUNC Fragment<T> block(int f, int n) const thread {
    const Pair<T> first = pair_in<T>(vectors[n][0][f / 8], f % 8 / 2);
    const Pair<T> second = pair_in<T>(vectors[n][1][f / 8], f % 8 / 2);
    return fragment_of<T>(first[f % 2], second[f % 2]);
  }

  METAL_FUNC void load(const thread CacheBlocks<T, kKeys>& values,
                       int begin,
                       FragmentPlace place) thread {
    MLX_ANVIL_UNROLL
    for (int v = 0; v < 2 * kColumnFragments * kVectors; ++v) {
      const int n = v / (2 * kVectors), e = v / kVectors % 2, i = v % kVectors;
      vectors[n][e][i] = values.load(begin, n, place.column + e, column(i, place));
    }
  }
};

template <typename T, int kDim, int kKeys>
struct DecodeMatrixRows {
  using State = DecodeMatrixState<T, kDim, kKeys>;
  using Keys = KeyVectors<T, kDim, kKeys>;
  using Values = ValueVectors<T, kDim, kKeys>;
  enum { kRows = State::kRows };

  State state;
  CacheBlocks<T, kKeys> all_keys;    // of this part
  CacheBlocks<T, kKeys> all_values;  // likewise
  RegTile<T, kDim, kRows> q;         // columns x rows, in the order of KeyVectors
  // The next block, prefetched while the current one is processed.
  Keys keys;
  Values values;

  // `query` is row place.row.
  METAL_FUNC void begin(const device T* query, constant AttentionParams& params) thread {
    const Rows<T> one = {query, 0, params.q_strides[3], 1, params.head_dim};
    MLX_ANVIL_UNROLL
    for (int k = 0; k < kDim / 8; k += 4) {
      const uint4 vector = load_eight(one, 0, Keys::column(k / 4, state.place));
      MLX_ANVIL_UNROLL
      for (int c = 0; c < 4; ++c) {
        const Pair<T> pair = pair_in<T>(vector, c);
        q.fragments[k + c][0] = transposed(fragment_of<T>(pair.x, pair.y), state.place);
      }
    }
    state.clear();
  }

  METAL_FUNC void look_up(int begin) thread {
    all_keys.look_up(begin);
    all_values.look_up(begin);
  }
  METAL_FUNC void load_keys(int begin) thread { keys.load(all_keys, begin, state.place); }
  METAL_FUNC void load_values(int begin) thread { values.load(all_values, begin, state.place); }

  // Processes the loaded block, which starts at `begin`, and prefetches the one at `next`.
  METAL_FUNC void attend(int begin,
                         int next,
                         const device uchar* mask,
                         constant AttentionParams& params) thread {
    typename State::Scores scores;
    scores.zero();
    scores.mma(keys, q);
    load_keys(next);
    const float2 highest = state.finish_scores(begin, mask, params, scores);
    if (state.needs_room(highest)) {
      state.scale(state.make_room(highest));
    }
    RegTile<T, kKeys, kRows> weights;
    MLX_ANVIL_UNROLL
    for (int n = 0; n < State::kKeyFragments; ++n) {
      weights.fragments[n][0] = fragment_of<T>(state.weights(scores, n));
    }
    state.out.mma(values, weights);
    load_values(next);
    look_up(2 * next - begin);
  }
};

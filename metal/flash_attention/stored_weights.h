// Probabilities P and their gradients dS in device memory, between two launches of the backward:
// one computes them with dQ, the other multiplies them, dV = P^T dO and dK = dS^T Q. A chunk of
// heads and queries is stored at a time, so that memory does not grow with the square of the
// length.
//
// A head has a strip for every 8 queries: for every 8 keys the 8 x 8 block of P and that of dS, 128
// contiguous elements. Keys count from the first one of stored_range(), so that with a window a
// strip is shorter than the keys.
#pragma once

#include "metal/common/reg_tile.h"
#include "metal/flash_attention/scores.h"

METAL_FUNC int round_down(int position) {
  return position & ~(kStoredRows - 1);
}

// Keys that are stored for the square's rows at `first`, which is a multiple of kStoredRows: all
// squares in which a query sees a key. Elsewhere nothing is written, and nothing read.
template <typename Lengths = EqualLengths>
METAL_FUNC KeyRange stored_range(constant AttentionParams& params,
                                 int first,
                                 Lengths lengths = Lengths()) {
  const KeyRange visible = visible_keys(
      params, first, metal::min(first + kStoredRows, lengths.queries(params)) - 1, lengths);
  return {round_down(visible.begin), round_down(visible.end + kStoredRows - 1)};
}

// The chunk's weights, from a strip of a head on.
template <typename Data>
struct StoredStrips {
  Data data;
  uint pairs;  // elements of a strip, in pairs: as many fit 32 bits

  METAL_FUNC StoredStrips(Data blocks,
                          constant AttentionBackwardParams& params,
                          int head,
                          int row) thread {
    pairs = 8u * uint(params.stored_keys);
    data = blocks + (static_cast<long>(head) * params.rows + row) * (2l * params.stored_keys);
  }
};

// Stores a SIMD group's P and dS of a tile. `to` is the lane's element of the first block.
template <typename T, int kRows, int kKeys>
METAL_FUNC void store_weights(device T* to,
                              long strip,
                              const thread RegTile<T, kRows, kKeys>& p,
                              const thread RegTile<T, kRows, kKeys>& d_scores) {
  MLX_ANVIL_UNROLL
  for (int f = 0; f < kRows * kKeys / 64; ++f) {
    const int i = f / (kKeys / 8), n = f % (kKeys / 8);
    device T* const block = to + (i * strip + 128 * n);
    *reinterpret_cast<device Pair<T>*>(block) = elements_of(p.fragments[i][n]);
    *reinterpret_cast<device Pair<T>*>(block + 64) = elements_of(d_scores.fragments[i][n]);
  }
}

// The transpose of the first kStrips strips of a square, as the left operand of RegTile::mma: rows
// are keys.
template <typename T, int kStrips>
struct TransposedWeights {
  using Element = T;
  enum { kColumnFragments = kStrips };

  const device T* data;
  ulong strip;  // elements
  FragmentPlace place;

  METAL_FUNC Fragment<T> block(int i, int k) const thread {
    const device T* own = data + k * strip;
    const int at = 128 * i + place.column * 8 + place.row;
    return fragment_of<T>(own[at], own[at + 8]);
  }
};

// Adds weights^T rows to the sums, kStrips strips at a time, whose loads are in flight together.
// The loop must not unroll, which would move all loads to its front: so its count depends on
// `rows`, of which there is at least one. All strips of a square are stored.
template <int kStrips, int kStride, typename T, typename Sums>
METAL_FUNC void add_products(thread Sums& sums,
                             TransposedWeights<T, kStrips> weights,
                             const threadgroup T* tile,
                             int rows) {
  MLX_ANVIL_NO_UNROLL
  do {
    sums.mma(weights, SharedTile<T, kStride>{tile, weights.place});
    weights.data += kStrips * weights.strip;
    tile += 8 * kStrips * kStride;
    rows -= 8 * kStrips;
  } while (rows > 0);
}

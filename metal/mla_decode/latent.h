// A simdgroup's columns of a block of keys, and of the queries, in registers.
//
// A lane loads 16 bytes of one key at a time. A sum over columns may take them in any order, so
// each pair in those bytes serves as its elements of a fragment of its own. The fragments of a
// block are the left operand of scores^T = keys q^T and, without the rope part, the right one of
// out = weights latent: one load serves both products.
#pragma once

#include "metal/common/reg_tile.h"
#include "metal/flash_attention/scores.h"

// Pair `c` of 16 bytes, and the reverse.
template <typename T>
struct SixteenBytes {
  enum { kSize = 8, kPairs = 4 };
  METAL_FUNC static Pair<T> pair(uint4 bits, int c) { return as_type<Pair<T> >(bits[c]); }
  METAL_FUNC static void set_pair(thread uint4& bits, int c, Pair<T> pair) {
    bits[c] = as_type<uint>(pair);
  }
};

template <>
struct SixteenBytes<float> {
  enum { kSize = 4, kPairs = 2 };
  METAL_FUNC static float2 pair(uint4 bits, int c) {
    return float2(as_type<float>(bits[2 * c]), as_type<float>(bits[2 * c + 1]));
  }
  METAL_FUNC static void set_pair(thread uint4& bits, int c, float2 pair) {
    bits[2 * c] = as_type<uint>(pair.x);
    bits[2 * c + 1] = as_type<uint>(pair.y);
  }
};

// Columns of the latent, and of the rope part, that a simdgroup has. Column numbers start at its
// first one.
template <typename T, int kLatent, int kRope>
struct LatentColumns {
  using Bytes = SixteenBytes<T>;
  enum { kPairs = Bytes::kPairs, kVectors = kLatent / (4 * int(Bytes::kSize)) };
  enum { kLatentFragments = kLatent / 8, kFragments = (kLatent + kRope) / 8 };
  static_assert(kVectors * kPairs == kLatentFragments, "whole vectors");

  // The first column of the lane's vector i, where place.column is `column`.
  METAL_FUNC static int of_vector(int i, int column) {
    return (4 * i + column / 2) * int(Bytes::kSize);
  }

  // The column of the latent that is column `column` of fragment f.
  METAL_FUNC static int of_fragment(int f, int column) {
    return of_vector(f / kPairs, column) + f % kPairs * 2 + column % 2;
  }
};

template <typename T, int kLatent, int kRope, int kKeys>
struct LatentBlock {
  using Element = T;
  using Columns = LatentColumns<T, kLatent, kRope>;
  using Bytes = typename Columns::Bytes;
  enum { kInOrder = false };
  enum { kKeyFragments = kKeys / 8, kColumnFragments = Columns::kFragments };
  enum { kRopeFragments = kRope / 8 };

  uint4 latent[kKeyFragments][Columns::kVectors];
  Pair<T> rope[kKeyFragments][kRopeFragments];

  METAL_FUNC Fragment<T> block(int n, int f) const thread {
    const bool of_latent = f < Columns::kLatentFragments;
    const Pair<T> pair = of_latent
                             ? Bytes::pair(latent[n][f / Columns::kPairs], f % Columns::kPairs)
                             : rope[n][f - Columns::kLatentFragments];
    return fragment_of<T>(pair.x, pair.y);
  }

  // Of keys from `begin` on, of which there is at least one.
  METAL_FUNC void load(Rows<T> latents, Rows<T> ropes, int begin, FragmentPlace place) thread {
    const Rows<T> own_latents = rows_from(latents, begin), own_ropes = rows_from(ropes, begin);
    MLX_ANVIL_UNROLL
    for (int v = 0; v < kKeyFragments * Columns::kVectors; ++v) {
      const int n = v / Columns::kVectors, i = v % Columns::kVectors;
      latent[n][i] =
          load_bytes(own_latents, 8 * n + place.row, Columns::of_vector(i, place.column));
    }
    MLX_ANVIL_UNROLL
    for (int v = 0; v < kKeyFragments * kRopeFragments; ++v) {
      const int n = v / kRopeFragments, i = v % kRopeFragments;
      rope[n][i] = load_pair(own_ropes, 8 * n + place.row, 8 * i + place.column, rows_are_vectors,
                             /*full=*/false);
    }
  }

 private:
  // Zeros outside.
  METAL_FUNC static uint4 load_bytes(Rows<T> from, int row, int column) {
    if (rows_are_vectors) {
      return load_vector<uint4>(from, row, column, /*full=*/false);
    }
    uint4 bits = uint4(0);
    MLX_ANVIL_UNROLL
    for (int c = 0; c < Columns::kPairs; ++c) {
      Bytes::set_pair(bits, c, load_pair(from, row, column + 2 * c, false, false));
    }
    return bits;
  }
};

// Sums of simdgroups that split the terms of a tile.
#pragma once

#include "metal/common/reg_tile.h"

// Adds to the sums of the first simdgroups, Tile::kFirst, those of the others, in order. Returns
// false for the others.
template <typename Tile>
METAL_FUNC bool add_simdgroups(thread typename Tile::Sums& sums,
                               threadgroup float2* shares,
                               uint simdgroup,
                               uint lane) {
  enum { kCount = Tile::Sums::kFragments, kColumns = Tile::Sums::kColumnFragments };
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // all have read the last stage
  const bool is_first = simdgroup < Tile::kFirst;
  if (!is_first) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kCount; ++i) {
      shares[((simdgroup - Tile::kFirst) * kCount + i) * 32 + lane] =
          elements_of(sums.fragments[i / kColumns][i % kColumns]);
    }
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  if (is_first) {
    MLX_ANVIL_UNROLL
    for (int s = Tile::kFirst; s < Tile::kSimdgroups; s += Tile::kFirst) {
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kCount; ++i) {
        thread Fragment<float>& own = sums.fragments[i / kColumns][i % kColumns];
        own = fragment_of<float>(elements_of(own) +
                                 shares[((simdgroup + s - Tile::kFirst) * kCount + i) * 32 + lane]);
      }
    }
  }
  return is_first;
}

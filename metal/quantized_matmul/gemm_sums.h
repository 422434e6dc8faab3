// Sums of a tile of W x^T: those of simdgroups that split the terms, and the results.
#pragma once

#include "metal/common/reg_tile.h"
#include "metal/quantized_matmul/params.h"
#include "metal/quantized_matmul/parts.h"

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

// Stores the sums of a simdgroup, or part `part` of them.
template <typename Tile>
METAL_FUNC void store_outputs(const thread Tile& tile,
                              const thread typename Tile::Sums& sums,
                              constant QuantizedGemmParams& params,
                              int first_row,
                              int first_output,
                              uint batch,
                              uint part,
                              long batches,
                              device uchar* out) {
  using T = typename Tile::Element;
  enum { kFragments = Tile::Sums::kRowFragments };
  const bool pairs_are_aligned = params.outputs % 2 == 0;
  MLX_ANVIL_UNROLL
  for (int f = 0; f < kFragments; ++f) {
    const int output = first_output + 8 * (kFragments * tile.across + f);
    MLX_ANVIL_UNROLL
    for (int m = 0; m < Tile::Sums::kColumnFragments; ++m) {
      const Fragment<float> own = sums.fragments[f][m];
      if (outputs_are_in_parts) {
        const int row = first_row + 8 * m + tile.place.column, n = output + tile.place.row;
        device float* const to = reinterpret_cast<device float*>(out) +
                                 ((part * batches + batch) * params.rows + row) * params.outputs;
        if (n < params.outputs && row < params.rows) {
          to[n] = elements_of(own).x;
        }
        if (n < params.outputs && row + 1 < params.rows) {
          to[params.outputs + n] = elements_of(own).y;
        }
      } else {
        const int row = first_row + 8 * m + tile.place.row;
        const Fragment<T> turned = transposed(fragment_of<T>(elements_of(own)), tile.place);
        if (row < params.rows) {
          store_pair(
              reinterpret_cast<device T*>(out) + (long(batch) * params.rows + row) * params.outputs,
              output + tile.place.column, params.outputs, float2(elements_of(turned)),
              pairs_are_aligned, false);
        }
      }
    }
  }
}

// Tiles of gemm_matrix.h and gemm_group.h whose rows of x are pairs of one expert.
#pragma once

#include "metal/gather_matmul/gated_results.h"
#include "metal/gather_matmul/pair_tile.h"
#include "metal/quantized_matmul/gated_product.h"
#include "metal/quantized_matmul/gemm_steps.h"

// Rows of w that a tile has of each matrix.
template <typename Tile>
struct GemmOutputs {
  enum { kCount = Tile::kOutputs / Tile::kMatrixCount };
};

// The tile of these pairs and of block `block` of the rows of their expert. `any` is an address.
template <typename Tile, typename T>
METAL_FUNC Tile gemm_tile_of_pairs(PairTile pairs,
                                   GemmArrays<Tile> arrays,
                                   const device T* any,
                                   constant GatherGemmParams& params,
                                   uint block,
                                   uint simdgroup,
                                   uint lane) {
  const uint first_output = block * GemmOutputs<Tile>::kCount;
  const uint outputs = params.gather.product.outputs;
  return gemm_tile<Tile>(arrays, long(pairs.expert) * outputs + first_output,
                         outputs - first_output, pairs.x_row, pairs.rows, params.gemm, simdgroup,
                         lane, reinterpret_cast<const device uchar*>(any));
}

// Where a SIMD group stores its results: its sums, or activation(gate) * up.
template <typename Tile, typename T, typename Added>
struct PairResults {
  enum { kMatrices = Tile::kMatrixCount, kFragments = Tile::Sums::kRowFragments };
  enum { kColumns = Tile::Sums::kColumnFragments };

  PairTile pairs;
  device T* out;
  Added added;
  uint block;  // as for gemm_tile_of_pairs

  // The lane's results of eight rows of x, from row 8 m on, by fragment f of the sums and that of
  // the last matrix.
  METAL_FUNC void store(const thread Tile& tile,
                        int f,
                        int m,
                        float2 first,
                        float2 last,
                        constant QuantizedParams& product) const thread {
    const int outputs = product.outputs;
    const int output =
        block * GemmOutputs<Tile>::kCount + 8 * ((kFragments * tile.across + f) / kMatrices);
    const int n = metal::min(output + tile.place.row, outputs - 1);
    const float2 own = float2(result_of<kMatrices>(first.x, last.x, n, added, product),
                              result_of<kMatrices>(first.y, last.y, n, added, product));
    const int row = 8 * m + tile.place.row;
    const Fragment<T> turned = transposed(fragment_of<T>(own), tile.place);
    if (row < pairs.rows) {
      store_pair(out + (ulong(pairs.out_row) + row) * uint(outputs), output + tile.place.column,
                 outputs, float2(elements_of(turned)), outputs % 2 == 0, false);
    }
  }

  METAL_FUNC void store(const thread Tile& tile,
                        const thread typename Tile::Sums& sums,
                        constant QuantizedParams& product) const thread {
    MLX_ANVIL_UNROLL
    for (int f = 0; f < int(kFragments); f += kMatrices) {
      MLX_ANVIL_UNROLL
      for (int m = 0; m < int(kColumns); ++m) {
        store(tile, f, m, elements_of(sums.fragments[f][m]),
              elements_of(sums.fragments[f + kMatrices - 1][m]), product);
      }
    }
  }
};

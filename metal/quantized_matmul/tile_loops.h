// The loops of tiles.metal: sums of a tile of up to 32 rows of x, which pass through threadgroup
// memory (paired_tile.h). Weights are fragments (lane_weights.h).
#pragma once

#include "metal/common/reg_tile.h"
#include "metal/quantized_matmul/few_rows.h"
#include "metal/quantized_matmul/lane_weights.h"
#include "metal/quantized_matmul/paired_tile.h"
#include "metal/quantized_matmul/tiled_product.h"

enum { kOutputsOfLanes = 16, kGatedOutputs = 8 };

// x W^T of two fragments of rows of w. `own` are the lane's rows in them.
template <typename T, typename Format>
METAL_FUNC void products_of_tile(RowsOfX<T> rows,
                                 const thread WeightRow<T, Format> (&own)[2],
                                 constant QuantizedParams& params,
                                 threadgroup Pair<T>* tile,
                                 uint lane,
                                 uint thread_index,
                                 thread RegTile<float, kOutputsOfLanes, kPairedRows>& sums) {
  using Tile = PairedRows<T>;
  const FragmentPlace place = fragment_place(lane);
  const int lane_column = kLaneCodes * (place.column / 2);
  const uint own_x =
      Tile::place(place.column / 2, kLaneCodes * (place.row / 2) + 4 * (place.row % 2));
  sums.zero();
  LaneWeights<T, Format, kLaneCodes> weights[2];
  MLX_ANVIL_NO_UNROLL
  for (int begin = 0; begin < params.columns; begin += kPairedColumns) {
    const int column = begin + lane_column;
    MLX_ANVIL_UNROLL
    for (int f = 0; f < 2; ++f) {
      weights[f].load(own[f], column, steps_are_whole || column < params.columns, params);
    }
    Tile::copy(tile, rows, begin, x_and_out_are_vectors, steps_are_whole, thread_index);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    MLX_ANVIL_UNROLL
    for (int piece = 0; piece < kLaneCodes / 8; ++piece) {
      float v[2][8];
      weights[0].weights(piece, v[0]);
      weights[1].weights(piece, v[1]);
      MLX_ANVIL_UNROLL
      for (int j = 0; j < 4; ++j) {
        Pair<T> pairs[kPairedFragments];
        load_unit<T>(tile + own_x + Tile::place(0, 8 * piece) + j * kPairedFragments, pairs);
        MLX_ANVIL_UNROLL
        for (int i = 0; i < kPairedFragments; ++i) {
          MLX_ANVIL_UNROLL
          for (int f = 0; f < 2; ++f) {
            add_product<T>(sums.fragments[f][i], float2(v[f][j], v[f][j + 4]), pairs[i]);
          }
        }
      }
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
}

// x W of 32 columns of w, of which the lane has eight from `column` on.
template <typename T, typename Format>
METAL_FUNC void plain_products_of_tile(TiledProduct<T, Format> product,
                                       RowsOfX<T> rows,
                                       int column,
                                       constant QuantizedParams& params,
                                       threadgroup Pair<T>* tile,
                                       uint lane,
                                       uint thread_index,
                                       thread RegTile<float, kPairedRows, 32>& sums) {
  using Tile = PairedColumns<T>;
  const FragmentPlace place = fragment_place(lane);
  const bool has_columns = column < params.columns;
  const uint own_x = Tile::place(place.row, place.column / 2);
  sums.zero();
  MLX_ANVIL_NO_UNROLL
  for (int begin = 0; begin < params.outputs; begin += kPairedColumns) {
    Tile::copy(tile, rows, begin, x_and_out_are_vectors, steps_are_whole, thread_index);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    MLX_ANVIL_UNROLL
    for (int d = 0; d < kPairedColumns; d += 8) {
      const int n = begin + d + place.row;
      LaneWeights<T, Format, 8> weights;
      weights.load(product.row_of_w(n, params), column,
                   has_columns && (steps_are_whole || n < params.outputs), params);
      float v[8];
      weights.weights(0, v);
      Pair<T> pairs[kPairedFragments];
      load_unit<T>(tile + own_x + d / 2 * kPairedFragments, pairs);
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kPairedFragments; ++i) {
        MLX_ANVIL_UNROLL
        for (int j = 0; j < 4; ++j) {
          metal::simdgroup_multiply_accumulate(
              sums.fragments[i][j], fragment_of<T>(pairs[i].x, pairs[i].y),
              fragment_of<float>(v[j], v[j + 4]), sums.fragments[i][j]);
        }
      }
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
}

// Stores a lane's results of the plain product. Returns whether one has overflowed.
template <typename T, typename Format>
METAL_FUNC bool store_plain(TiledProduct<T, Format> product,
                            ResultPlace first,
                            const thread RegTile<float, kPairedRows, 32>& sums,
                            constant QuantizedParams& params) {
  bool overflowed = false;
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kPairedFragments; ++i) {
    MLX_ANVIL_UNROLL
    for (int pair = 0; pair < 4; ++pair) {
      const int j = 2 * (pair % 2), e = pair / 2;
      overflowed |= product.store(
          first.row + 8 * i, first.column + 2 * pair, params.columns,
          float2(elements_of(sums.block(i, j))[e], elements_of(sums.block(i, j + 1))[e]));
    }
  }
  return overflowed;
}

// Returns the total of a row of x and a row of w, computed again if it has overflowed.
template <typename T, typename Format>
METAL_FUNC float total_in_range(float total,
                                TiledProduct<T, Format> product,
                                int row,
                                int output,
                                uint zero,
                                constant QuantizedParams& params) {
  return has_overflowed<T>(total)
             ? product_in_units(product.row_of_w(output + int(zero), params), product.x, params,
                                (uint(row) + zero) * uint(params.columns))
             : total;
}

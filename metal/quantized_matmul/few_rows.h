// Fragments of rows of w times up to 32 rows of x. The simdgroups of a threadgroup split the
// columns, so that a threadgroup has only 16 or 32 rows of w, and few rows of x still occupy a GPU.
// Each simdgroup reads x itself: a lane's columns are adjacent in device memory.
#pragma once

#include "metal/common/reg_tile.h"
#include "metal/quantized_matmul/lane_weights.h"
#include "metal/quantized_matmul/paired_tile.h"
#include "metal/quantized_matmul/tiled_product.h"

enum { kTiledThreads = kPairedThreads, kTiledSimdgroups = kTiledThreads / 32 };
enum { kLaneCodes = kPairedColumns / 4 };

// A lane's results in a fragment are of its row of w, place.row, and of rows place.column and
// place.column + 1 of x (fragment_place). `own` are its rows of w in the fragments. Returns in
// simdgroup i the results of rows [8 i, 8 i + 8) of x; other simdgroups have none.
template <typename T, typename Format, int kRows, int kOwn>
METAL_FUNC void products_of_few(RowsOfX<T> rows,
                                const thread WeightRow<T, Format> (&own)[kOwn],
                                constant QuantizedParams& params,
                                threadgroup float2 (*shares)[kOwn][kRows / 8][32],
                                uint simdgroup,
                                uint lane,
                                thread float2 (&totals)[kOwn]) {
  enum { kFragments = kRows / 8 };
  const FragmentPlace place = fragment_place(lane);
  const int lane_column = kLaneCodes * (place.column / 2);
  const int x_column = kLaneCodes * (place.row / 2) + 4 * (place.row % 2);

  RegTile<float, 8 * kOwn, kRows> sums;
  sums.zero();
  LaneWeights<T, Format, kLaneCodes> weights[kOwn];
  MLX_ANVIL_NO_UNROLL
  for (int begin = kPairedColumns * simdgroup; begin < params.columns;
       begin += kPairedColumns * kTiledSimdgroups) {
    const int column = begin + lane_column;
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kOwn; ++f) {
      weights[f].load(own[f], column, steps_are_whole || column < params.columns, params);
    }
    MLX_ANVIL_UNROLL
    for (int piece = 0; piece < kLaneCodes / 8; ++piece) {
      float v[kOwn][8];
      MLX_ANVIL_UNROLL
      for (int f = 0; f < kOwn; ++f) {
        weights[f].weights(piece, v[f]);
      }
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kFragments; ++i) {
        if (kFragments > 2) {
          metal::simdgroup_barrier(metal::mem_flags::mem_none);  // loads ahead would take registers
        }
        T two_rows[2][4];
        MLX_ANVIL_UNROLL
        for (int e = 0; e < 2; ++e) {
          const int from = begin + x_column + 8 * piece;
          load_elements<4>(rows, rows.at(8 * i + place.column + e, from), from,
                           x_and_out_are_vectors, steps_are_whole, two_rows[e]);
        }
        MLX_ANVIL_UNROLL
        for (int j = 0; j < 4; ++j) {
          MLX_ANVIL_UNROLL
          for (int f = 0; f < kOwn; ++f) {
            add_product<T>(sums.fragments[f][i], float2(v[f][j], v[f][j + 4]),
                           Pair<T>(two_rows[0][j], two_rows[1][j]));
          }
        }
      }
    }
  }
  MLX_ANVIL_UNROLL
  for (int f = 0; f < kOwn; ++f) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kFragments; ++i) {
      shares[simdgroup][f][i][lane] = elements_of(sums.block(f, i));
    }
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  MLX_ANVIL_UNROLL
  for (int f = 0; f < kOwn; ++f) {
    totals[f] = float2(0.0f);
  }
  if (int(simdgroup) < kFragments) {
    MLX_ANVIL_UNROLL
    for (int s = 0; s < kTiledSimdgroups; ++s) {
      MLX_ANVIL_UNROLL
      for (int f = 0; f < kOwn; ++f) {
        totals[f] += shares[s][f][simdgroup][lane];
      }
    }
  }
}

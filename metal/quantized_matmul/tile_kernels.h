// The kernels of tiles.metal without their bindings: what a threadgroup does. `first` is the first
// row of w.
#pragma once

#include "metal/quantized_matmul/params.h"
#include "metal/quantized_matmul/tile_loops.h"

template <typename T, typename Format>
METAL_FUNC void tiles_transposed(WeightRow<T, Format> first,
                                 const device T* x,
                                 device T* out,
                                 constant QuantizedParams& params,
                                 threadgroup Pair<T>* tile,
                                 uint3 group,
                                 uint simdgroup,
                                 uint lane,
                                 uint thread_index) {
  const TiledProduct<T, Format> product = {x, first, out, group.z, params.rows};
  const int first_row = group.y * kPairedRows;
  const ResultPlace results = TransposedPlace::first(
      first_row, kOutputsOfLanes * (group.x * kTiledSimdgroups + simdgroup), lane);
  const int output = results.column;
  const WeightRow<T, Format> own[2] = {product.row_of_w(output, params),
                                       product.row_of_w(output + 1, params)};
  RegTile<float, kOutputsOfLanes, kPairedRows> sums;
  products_of_tile<T, Format>(product.rows_of_x(first_row, kPairedRows, params.columns), own,
                              params, tile, lane, thread_index, sums);

  bool overflowed = false;
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kPairedFragments; ++i) {
    overflowed |=
        store_transposed(product, results.row + 8 * i, output, elements_of(sums.block(0, i)),
                         elements_of(sums.block(1, i)), params);
  }
  const uint zero = SumsOverflow<T>::kMay ? unknown_zero(lane) : 0;
  if (overflowed) {
    const uint3 own_group = group + zero;
    keep_results_in_range<TransposedPlace, true, T, Format>(
        {x, first, out, own_group.z, params.rows},
        TransposedPlace::first(
            own_group.y * kPairedRows,
            kOutputsOfLanes * (own_group.x * kTiledSimdgroups + simdgroup + zero), lane + zero),
        4 * kPairedFragments, params);
  }
}

template <typename T, typename Format, int kRows>
METAL_FUNC void tiles_few(WeightRow<T, Format> first,
                          const device T* x,
                          device T* out,
                          constant QuantizedParams& params,
                          threadgroup float2 (*shares)[2][kRows / 8][32],
                          uint3 group,
                          uint simdgroup,
                          uint lane) {
  const TiledProduct<T, Format> product = {x, first, out, group.z, params.rows};
  const int first_row = group.y * kRows;
  const FragmentPlace place = fragment_place(lane);
  const int output = TransposedPlace::first(0, kOutputsOfLanes * group.x, lane).column;
  const WeightRow<T, Format> own[2] = {product.row_of_w(output, params),
                                       product.row_of_w(output + 1, params)};
  float2 totals[2];
  products_of_few<T, Format, kRows>(product.rows_of_x(first_row, kRows, params.columns), own,
                                    params, shares, simdgroup, lane, totals);
  if (int(simdgroup) >= kRows / 8) {
    return;
  }
  const bool overflowed = store_transposed(product, first_row + 8 * int(simdgroup) + place.column,
                                           output, totals[0], totals[1], params);
  const uint zero = SumsOverflow<T>::kMay ? unknown_zero(lane) : 0;
  if (overflowed) {
    const uint3 own_group = group + zero;
    keep_results_in_range<TransposedPlace, true, T, Format>(
        {x, first, out, own_group.z, params.rows},
        TransposedPlace::first(own_group.y * kRows + 8 * (simdgroup + zero),
                               kOutputsOfLanes * own_group.x, lane + zero),
        4, params);
  }
}

template <typename T, typename Format>
METAL_FUNC void tiles_plain(WeightRow<T, Format> first,
                            const device T* x,
                            device T* out,
                            constant QuantizedParams& params,
                            threadgroup Pair<T>* tile,
                            uint3 group,
                            uint simdgroup,
                            uint lane,
                            uint thread_index) {
  const TiledProduct<T, Format> product = {x, first, out, group.z, params.rows};
  const int first_row = group.y * kPairedRows;
  const int first_column = 32 * (group.x * kTiledSimdgroups + simdgroup);
  const ResultPlace results = PlainPlace::first(first_row, first_column, lane);
  RegTile<float, kPairedRows, 32> sums;
  plain_products_of_tile(product, product.rows_of_x(first_row, kPairedRows, params.outputs),
                         results.column, params, tile, lane, thread_index, sums);
  const bool overflowed = store_plain(product, results, sums, params);
  const uint zero = SumsOverflow<T>::kMay ? unknown_zero(lane) : 0;
  if (overflowed) {
    const uint3 own_group = group + zero;
    keep_results_in_range<PlainPlace, false, T, Format>(
        {x, first, out, own_group.z, params.rows},
        PlainPlace::first(own_group.y * kPairedRows,
                          32 * (own_group.x * kTiledSimdgroups + simdgroup + zero), lane + zero),
        8 * kPairedFragments, params);
  }
}

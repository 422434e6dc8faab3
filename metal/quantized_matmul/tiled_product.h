// What the kernels of tiles.metal share: offsets of their arrays, and stores of results. Results
// that have overflowed are computed again (large_numbers.h).
#pragma once

#include "metal/common/tile.h"
#include "metal/quantized_matmul/dequant.h"
#include "metal/quantized_matmul/large_numbers.h"
#include "metal/quantized_matmul/paired_tile.h"
#include "metal/quantized_matmul/params.h"
#include "metal/quantized_matmul/vectors.h"

// The arrays of a kernel, and a lane's stores of results.
template <typename T, typename Format>
struct TiledProduct {
  const device T* x;
  WeightRow<T, Format> first;
  device T* out;
  uint batch;
  int rows;  // of x and out per batch

  METAL_FUNC RowsOfX<T> rows_of_x(int first_row, int count, int depth) const thread {
    const uint before = batch * uint(rows) + uint(first_row);
    return {x, before * uint(depth), metal::min(count, rows - first_row), depth};
  }

  METAL_FUNC WeightRow<T, Format> row_of_w(int row, constant QuantizedParams& params) const thread {
    const uint index = batch * uint(params.outputs) + uint(metal::min(row, params.outputs - 1));
    return row_of_tile(first, index, params.columns, params.group_shift);
  }

  // Stores columns `column` and the next of a row. Returns whether a result has overflowed.
  METAL_FUNC bool store(int row, int column, int columns, float2 pair) const thread {
    if (row >= rows) {
      return false;
    }
    const uint at = (batch * uint(rows) + uint(row)) * uint(columns) + uint(column);
    if (x_and_out_are_vectors) {
      if (column < columns) {
        reinterpret_cast<device Pair<T>*>(out)[at / 2] =
            Pair<T>(static_cast<T>(pair.x), static_cast<T>(pair.y));
      }
    } else {
      if (column < columns) {
        out[at] = static_cast<T>(pair.x);
      }
      if (column + 1 < columns) {
        out[at + 1] = static_cast<T>(pair.y);
      }
    }
    return has_overflowed<T>(pair.x) || has_overflowed<T>(pair.y);
  }

  // Computes a result again if it has overflowed, where it exists.
  template <bool kTransposed>
  METAL_FUNC void keep_in_range(int row,
                                int column,
                                constant QuantizedParams& params) const thread {
    const int columns = kTransposed ? params.outputs : params.columns;
    if (row >= rows || column >= columns) {
      return;
    }
    const uint row_of_all = batch * uint(rows) + uint(row);
    device T* const to = out + (row_of_all * uint(columns) + uint(column));
    if (!has_overflowed<T>(static_cast<float>(*to))) {
      return;
    }
    if (kTransposed) {
      *to = static_cast<T>(
          product_in_units(row_of_w(column, params), x, params, row_of_all * uint(params.columns)));
      return;
    }
    const uint own = row_of_all * uint(params.outputs);
    float sum = 0.0f;
    MLX_ANVIL_NO_UNROLL
    for (int n = 0; n < params.outputs && !is_nan(sum); ++n) {
      sum = metal::fma(weight_at(row_of_w(n, params), column, params),
                       in_units(static_cast<float>(x[own + uint(n)])), sum);
    }
    *to = static_cast<T>(of_units(sum));
  }
};

// Where a lane has results. Eight rows of fragments: row, and the columns or rows next to it.
struct ResultPlace {
  int row, column;
};

// A lane of the transposed product has two columns of rows 8 i + place.row and the next.
struct TransposedPlace {
  METAL_FUNC static ResultPlace first(int first_row, int first_column, uint lane) {
    const FragmentPlace place = fragment_place(lane);
    return {first_row + place.column, first_column + 2 * place.row};
  }
  METAL_FUNC static ResultPlace result(ResultPlace first, int i) {
    return {first.row + 8 * (i / 4) + i / 2 % 2, first.column + i % 2};
  }
};

// A lane of the plain product has eight columns of rows 8 i + place.row.
struct PlainPlace {
  METAL_FUNC static ResultPlace first(int first_row, int first_column, uint lane) {
    const FragmentPlace place = fragment_place(lane);
    return {first_row + place.row, first_column + 4 * place.column};
  }
  METAL_FUNC static ResultPlace result(ResultPlace first, int i) {
    return {first.row + 8 * (i / 8), first.column + i % 8};
  }
};

// Computes those of a lane's `count` results again that have overflowed. All arguments are computed
// with unknown_zero, so that the loop over steps does not keep them.
template <typename Place, bool kTransposed, typename T, typename Format>
METAL_FUNC void keep_results_in_range(TiledProduct<T, Format> product,
                                      ResultPlace first,
                                      int count,
                                      constant QuantizedParams& params) {
  MLX_ANVIL_NO_UNROLL
  for (int i = 0; i < count; ++i) {
    const ResultPlace place = Place::result(first, i);
    product.template keep_in_range<kTransposed>(place.row, place.column, params);
  }
}

// Stores fragments of rows of w x rows of x: the lane's results for two rows of x.
template <typename T, typename Format>
METAL_FUNC bool store_transposed(TiledProduct<T, Format> product,
                                 int row,
                                 int column,
                                 float2 first,
                                 float2 second,
                                 constant QuantizedParams& params) {
  bool overflowed = false;
  MLX_ANVIL_UNROLL
  for (int e = 0; e < 2; ++e) {
    overflowed |= product.store(row + e, column, params.outputs, float2(first[e], second[e]));
  }
  return overflowed;
}

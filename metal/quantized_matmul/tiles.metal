// Quantized GEMM for more than two rows of x (plain: eight), with weights dequantised in registers
// (lane_weights.h): no tile of w is in threadgroup memory. For Apple's GPUs.
//   quantized_tiles_transposed  out[m, n] = sum over k of x[m, k] W[n, k]
//   quantized_tiles_few         the same, for up to 8, 16 or 32 rows
//   quantized_tiles_plain       out[m, k] = sum over n of x[m, n] W[n, k]
//
// Kernels: quantized_tiles_<transposed|plain>_<dtype>_<format>, and
// quantized_tiles_few_<dtype>_<format>_r<rows>.
// Grid: (blocks of columns of out, blocks of 32 rows, batch). A block has 64 columns (transposed),
// 16 (few), or 128 (plain). Threadgroup: 128 x 1 x 1.
// Bindings: x, w, scales, biases (x in place of absent ones), out, params.
// Function constants: 0: see dequant.h; 3: rows of x and of out consist of whole, aligned 16-byte
// vectors; 5: the summed dimension is a multiple of 64.
// Alignment: none beyond these. Arrays are dense, and have fewer than 2^32 elements or words.
//
// transposed: the transpose of out is computed, W times the transpose of x.
//   for each step of 64 columns:
//     load 16 codes of two rows of w per lane; copy 32 x 64 of x; barrier    (paired_tile.h)
//     for each piece of 8 codes: for each of 4 fragments:
//       sums += weights * x                                      (16 rows of w per simdgroup)
//     barrier
//   store sums; compute those that have overflowed again                     (large_numbers.h)
// few: each simdgroup takes every fourth step and reads x itself, so that a threadgroup has only 16
// rows of w, and few rows of x still occupy a GPU. Sums are added up in threadgroup memory.
// plain: a lane has 8 codes of one row of w; four fragments are 32 columns of out.
#include "metal/common/kernel.h"
#include "metal/common/reg_tile.h"
#include "metal/quantized_matmul/formats.h"
#include "metal/quantized_matmul/lane_weights.h"
#include "metal/quantized_matmul/paired_tile.h"
#include "metal/quantized_matmul/params.h"
#include "metal/quantized_matmul/tiled_product.h"

enum { kTiledThreads = kPairedThreads, kTiledSimdgroups = kTiledThreads / 32 };
enum { kLaneCodes = kPairedColumns / 4, kOutputsOfLanes = 16 };

template <typename T, typename Format>
[[kernel, max_total_threads_per_threadgroup(kTiledThreads)]] void quantized_tiles_transposed(
    const device T* x [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device typename Format::template Scale<T>* scales [[buffer(2)]],
    const device T* biases [[buffer(3)]],
    device T* out [[buffer(4)]],
    constant QuantizedParams& params [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  using Tile = PairedRows<T>;
  alignas(16) threadgroup Pair<T> tile[Tile::kSize];
  const TiledProduct<T, Format> product = {x, {w, scales, biases, 0, 0}, out, group.z};
  const int first_row = group.y * kPairedRows;
  const RowsOfX<T> rows = product.rows_of_x(first_row, kPairedRows, params.columns, params);
  const FragmentPlace place = fragment_place(lane);
  const ResultPlace results = TransposedPlace::first(
      first_row, kOutputsOfLanes * (group.x * kTiledSimdgroups + simdgroup), lane);
  const int output = results.column;
  const WeightRow<T, Format> own[2] = {product.row_of_w(output, params),
                                       product.row_of_w(output + 1, params)};
  const int lane_column = kLaneCodes * (place.column / 2);
  const uint own_x =
      Tile::place(place.column / 2, kLaneCodes * (place.row / 2) + 4 * (place.row % 2));

  RegTile<float, kOutputsOfLanes, kPairedRows> sums;
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
        {x, {w, scales, biases, 0, 0}, out, own_group.z},
        TransposedPlace::first(
            own_group.y * kPairedRows,
            kOutputsOfLanes * (own_group.x * kTiledSimdgroups + simdgroup + zero), lane + zero),
        4 * kPairedFragments, params);
  }
}

template <typename T, typename Format, int kRows>
[[kernel, max_total_threads_per_threadgroup(kTiledThreads)]] void quantized_tiles_few(
    const device T* x [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device typename Format::template Scale<T>* scales [[buffer(2)]],
    const device T* biases [[buffer(3)]],
    device T* out [[buffer(4)]],
    constant QuantizedParams& params [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  enum { kFragments = kRows / 8 };
  threadgroup float2 shares[kTiledSimdgroups][2][kFragments][32];
  const TiledProduct<T, Format> product = {x, {w, scales, biases, 0, 0}, out, group.z};
  const int first_row = group.y * kRows;
  const RowsOfX<T> rows = product.rows_of_x(first_row, kRows, params.columns, params);
  const FragmentPlace place = fragment_place(lane);
  const int output = TransposedPlace::first(0, kOutputsOfLanes * group.x, lane).column;
  const WeightRow<T, Format> own[2] = {product.row_of_w(output, params),
                                       product.row_of_w(output + 1, params)};
  const int lane_column = kLaneCodes * (place.column / 2);
  const int x_column = kLaneCodes * (place.row / 2) + 4 * (place.row % 2);

  RegTile<float, kOutputsOfLanes, kRows> sums;
  sums.zero();
  LaneWeights<T, Format, kLaneCodes> weights[2];
  MLX_ANVIL_NO_UNROLL
  for (int begin = kPairedColumns * simdgroup; begin < params.columns;
       begin += kPairedColumns * kTiledSimdgroups) {
    const int column = begin + lane_column;
    MLX_ANVIL_UNROLL
    for (int f = 0; f < 2; ++f) {
      weights[f].load(own[f], column, steps_are_whole || column < params.columns, params);
    }
    MLX_ANVIL_UNROLL
    for (int piece = 0; piece < kLaneCodes / 8; ++piece) {
      float v[2][8];
      weights[0].weights(piece, v[0]);
      weights[1].weights(piece, v[1]);
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
          for (int f = 0; f < 2; ++f) {
            add_product<T>(sums.fragments[f][i], float2(v[f][j], v[f][j + 4]),
                           Pair<T>(two_rows[0][j], two_rows[1][j]));
          }
        }
      }
    }
  }
  MLX_ANVIL_UNROLL
  for (int f = 0; f < 2; ++f) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kFragments; ++i) {
      shares[simdgroup][f][i][lane] = elements_of(sums.block(f, i));
    }
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  if (int(simdgroup) >= kFragments) {
    return;
  }
  float2 totals[2] = {float2(0.0f), float2(0.0f)};
  MLX_ANVIL_UNROLL
  for (int s = 0; s < kTiledSimdgroups; ++s) {
    MLX_ANVIL_UNROLL
    for (int f = 0; f < 2; ++f) {
      totals[f] += shares[s][f][simdgroup][lane];
    }
  }
  const bool overflowed = store_transposed(product, first_row + 8 * int(simdgroup) + place.column,
                                           output, totals[0], totals[1], params);
  const uint zero = SumsOverflow<T>::kMay ? unknown_zero(lane) : 0;
  if (overflowed) {
    const uint3 own_group = group + zero;
    keep_results_in_range<TransposedPlace, true, T, Format>(
        {x, {w, scales, biases, 0, 0}, out, own_group.z},
        TransposedPlace::first(own_group.y * kRows + 8 * (simdgroup + zero),
                               kOutputsOfLanes * own_group.x, lane + zero),
        4, params);
  }
}

template <typename T, typename Format>
[[kernel, max_total_threads_per_threadgroup(kTiledThreads)]] void quantized_tiles_plain(
    const device T* x [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device typename Format::template Scale<T>* scales [[buffer(2)]],
    const device T* biases [[buffer(3)]],
    device T* out [[buffer(4)]],
    constant QuantizedParams& params [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  using Tile = PairedColumns<T>;
  alignas(16) threadgroup Pair<T> tile[Tile::kSize];
  const TiledProduct<T, Format> product = {x, {w, scales, biases, 0, 0}, out, group.z};
  const int first_row = group.y * kPairedRows;
  const RowsOfX<T> rows = product.rows_of_x(first_row, kPairedRows, params.outputs, params);
  const FragmentPlace place = fragment_place(lane);
  const int first_column = 32 * (group.x * kTiledSimdgroups + simdgroup);
  const int column = PlainPlace::first(0, first_column, lane).column;
  const bool has_columns = column < params.columns;
  const uint own_x = Tile::place(place.row, place.column / 2);

  RegTile<float, kPairedRows, 32> sums;
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

  bool overflowed = false;
  const int row = first_row + place.row;
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kPairedFragments; ++i) {
    MLX_ANVIL_UNROLL
    for (int pair = 0; pair < 4; ++pair) {
      const int j = 2 * (pair % 2), e = pair / 2;
      overflowed |= product.store(
          row + 8 * i, column + 2 * pair, params.columns,
          float2(elements_of(sums.block(i, j))[e], elements_of(sums.block(i, j + 1))[e]), params);
    }
  }
  const uint zero = SumsOverflow<T>::kMay ? unknown_zero(lane) : 0;
  if (overflowed) {
    const uint3 own_group = group + zero;
    keep_results_in_range<PlainPlace, false, T, Format>(
        {x, {w, scales, biases, 0, 0}, out, own_group.z},
        PlainPlace::first(own_group.y * kPairedRows,
                          32 * (own_group.x * kTiledSimdgroups + simdgroup + zero), lane + zero),
        8 * kPairedFragments, params);
  }
}

// ---- kernels

#define INSTANTIATE_TILES(name, format, product, dtype, type)        \
  MLX_ANVIL_KERNEL("quantized_tiles_" #product "_" #dtype "_" #name, \
                   quantized_tiles_##product<type, format>)

#define INSTANTIATE_TILES_DTYPES(product)                                 \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_TILES, product, float32, float) \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_TILES, product, float16, half)  \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_TILES, product, bfloat16, bfloat)

INSTANTIATE_TILES_DTYPES(transposed)
INSTANTIATE_TILES_DTYPES(plain)

#define INSTANTIATE_FEW(name, format, dtype, type, rows)               \
  MLX_ANVIL_KERNEL("quantized_tiles_few_" #dtype "_" #name "_r" #rows, \
                   quantized_tiles_few<type, format, rows>)

#define INSTANTIATE_FEW_DTYPES(rows)                                 \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_FEW, float32, float, rows) \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_FEW, float16, half, rows)  \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_FEW, bfloat16, bfloat, rows)

INSTANTIATE_FEW_DTYPES(8)
INSTANTIATE_FEW_DTYPES(16)
INSTANTIATE_FEW_DTYPES(32)

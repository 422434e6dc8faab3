// Quantized GEMM for many rows of float32 x, on GPUs with matrix units. Tiles of w are dequantised
// into threadgroup memory and multiplied by tiles of x, in float32.
//   quantized_matmul_transposed  out[m, n] = sum over k of x[m, k] W[n, k]
//   quantized_matmul_plain       out[m, k] = sum over n of x[m, n] W[n, k]
//
// Kernels: quantized_matmul_<transposed|plain>_float32_<format>.
// Grid: (blocks of 64 columns of out, blocks of 32 rows, batch). Threadgroup: 128 x 1 x 1.
// Bindings: x, w, scales, biases (x in place of absent ones), out, params.
// Function constants: 0: see dequant.h; 3: rows of x and of out consist of whole, aligned 16-byte
// vectors.
// Alignment: none beyond these. Arrays are dense.
//
//   totals = 0
//   for each tile of 64 along the summed dimension:
//     stage 32 x 64 of x; dequantise 64 x 64 of w to float32      (threadgroup memory)
//     barrier; sums = 0
//     for each step of 8: sums += x fragments * w fragments       (16 x 32 per simdgroup)
//     totals += sums in float32; barrier
//   store totals; compute those that have overflowed again        (large_numbers.h)
#ifdef __MSLC__  // Apple's GPUs launch tiles.metal instead
#include "metal/common/kernel.h"
#include "metal/common/reg_tile.h"
#include "metal/quantized_matmul/dequant.h"
#include "metal/quantized_matmul/formats.h"
#include "metal/quantized_matmul/large_numbers.h"
#include "metal/quantized_matmul/params.h"
#include "metal/quantized_matmul/vectors.h"

// The simdgroups form a 2 x 2 grid: each has 16 rows and 32 columns of the 32 x 64 tile of out.
enum { kTileRows = 32, kTileColumns = 64, kTileDepth = 64, kTileThreads = 128 };
enum { kRowFragments = 2, kColumnFragments = 4 };

// Dequantises columns [column, column + 64) of rows [row, row + 64) of w. Elements past the last
// row or column become zero. Each thread has one chunk.
template <typename Format>
METAL_FUNC void unpack_tile(threadgroup float* to,
                            WeightRow<float, Format> first,
                            long first_row,
                            int row,
                            int column,
                            constant QuantizedParams& params,
                            uint thread_index) {
  enum { kStride = TileRow<float, kTileDepth>::kStride };
  enum { kWords = Format::kPart * Format::kBits / 32 };
  const int r = thread_index / 2, c = 32 * (thread_index % 2);
  threadgroup float* at = to + r * kStride + c;
  const bool has_row = row + r < params.outputs;
  const WeightRow<float, Format> from = weight_row<float, Format>(
      first, first_row + (has_row ? row + r : 0), params.columns, params.group_shift);
  MLX_ANVIL_UNROLL
  for (int part = 0; part < 32; part += Format::kPart) {
    const int begin = column + c + part;
    const bool exists = has_row && begin < params.columns;
    uint words[kWords] = {};
    float2 factors = float2(0.0f);
    if (exists) {
      load_codes<Format, Format::kPart>(from, begin, params.columns, words);
      factors = scale_and_bias(from, begin >> params.group_shift);
    }
    MLX_ANVIL_UNROLL
    for (int piece = 0; piece < Format::kPart / 8; ++piece) {
      float v[8];
      values_or_nan<Format>(words, piece, v);
      MLX_ANVIL_UNROLL
      for (int i = 0; i < 8; ++i) {
        at[part + 8 * piece + i] = metal::fma(Format::factor() * v[i], factors.x, factors.y);
      }
    }
  }
}

template <typename Format, bool kTransposed>
[[kernel, max_total_threads_per_threadgroup(kTileThreads)]] void quantized_matmul(
    const device float* x [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device typename Format::template Scale<float>* scales [[buffer(2)]],
    const device float* biases [[buffer(3)]],
    device float* out [[buffer(4)]],
    constant QuantizedParams& params [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  enum { kStride = TileRow<float, kTileDepth>::kStride };
  alignas(16) threadgroup float x_tile[kTileRows * kStride];
  alignas(16) threadgroup float w_tile[kTileColumns * kStride];

  const int depth = kTransposed ? params.columns : params.outputs;
  const int columns = kTransposed ? params.outputs : params.columns;
  const long batch = group.z;
  const int first_row = group.y * kTileRows, first_column = group.x * kTileColumns;
  const int rows = metal::min(int(kTileRows), params.rows - first_row);
  const device float* x_rows = x + (batch * params.rows + first_row) * depth;
  const WeightRow<float, Format> matrix = {w, scales, biases};
  const FragmentPlace place = fragment_place(lane);
  const int own_row = 8 * kRowFragments * (simdgroup / 2);
  const int own_column = 8 * kColumnFragments * (simdgroup % 2);

  RegTile<float, 8 * kRowFragments, 8 * kColumnFragments> totals;
  totals.zero();

  for (int begin = 0; begin < depth; begin += kTileDepth) {
    const Rows<float> from = {x_rows + begin, depth, 1, rows, depth - begin};
    copy_tile<float, kTileRows, kTileDepth, kTileThreads>(x_tile, from, x_and_out_are_vectors,
                                                          thread_index);
    unpack_tile(w_tile, matrix, batch * params.outputs, kTransposed ? first_column : begin,
                kTransposed ? begin : first_column, params, thread_index);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    // Matrix units may truncate where float32 arithmetic rounds, so they accumulate within a tile
    // only.
    RegTile<float, 8 * kRowFragments, 8 * kColumnFragments> sums;
    sums.zero();
    MLX_ANVIL_NO_UNROLL
    for (int d = 0; d < kTileDepth; d += 8) {
      RegTile<float, 8 * kRowFragments, 8> left;
      left.load(x_tile + own_row * kStride + d, kStride, place);
      if (kTransposed) {
        sums.mma(left, TransposedTile<float, kStride>{w_tile + own_column * kStride + d, place});
      } else {
        sums.mma(left, SharedTile<float, kStride>{w_tile + d * kStride + own_column, place});
      }
    }
    totals.add(sums);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }

  bool overflowed = false;
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kRowFragments; ++i) {
    const int row = own_row + 8 * i + place.row;
    if (row >= rows) {
      continue;
    }
    totals.store_row(i, out + (batch * params.rows + first_row + row) * columns,
                     first_column + own_column, columns, place, x_and_out_are_vectors);
    MLX_ANVIL_UNROLL
    for (int j = 0; j < kColumnFragments; ++j) {
      const float2 pair = elements_of(totals.block(i, j));
      overflowed |= has_overflowed<float>(pair.x) || has_overflowed<float>(pair.y);
    }
  }
  if (!overflowed) {
    return;
  }
  MLX_ANVIL_NO_UNROLL
  for (int i = 0; i < 2 * kRowFragments * kColumnFragments; ++i) {
    const int row = own_row + 8 * (i / (2 * kColumnFragments)) + place.row;
    const int column =
        first_column + own_column + 8 * (i / 2 % kColumnFragments) + place.column + i % 2;
    if (row < rows && column < columns) {
      device float* to = out + (batch * params.rows + first_row + row) * columns + column;
      if (has_overflowed<float>(*to)) {
        const device float* own = x_rows + long(row) * depth;
        *to = kTransposed ? product_in_units(
                                weight_row<float, Format>(matrix, batch * params.outputs + column,
                                                          params.columns, params.group_shift),
                                own, params)
                          : plain_product_in_units(matrix, batch * params.outputs, 0,
                                                   params.outputs, column, own, params);
      }
    }
  }
}

#endif

// ---- kernels

#ifdef __MSLC__
#define INSTANTIATE(name, format, product, transposed)             \
  MLX_ANVIL_KERNEL("quantized_matmul_" #product "_float32_" #name, \
                   quantized_matmul<format, transposed>)

MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE, transposed, true)
MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE, plain, false)
#endif

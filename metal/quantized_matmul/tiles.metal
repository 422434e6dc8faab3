// Quantized GEMM for more than two rows of x (plain: eight), with weights dequantised in registers
// (lane_weights.h): no tile of w is in threadgroup memory. For Apple's GPUs.
//   quantized_tiles_transposed  out[m, n] = sum over k of x[m, k] W[n, k]
//   quantized_tiles_few         the same, for up to 8, 16 or 32 rows
//   quantized_tiles_gated       out = activation(g) * u,  g and u: such products with gate and up
//   quantized_tiles_plain       out[m, k] = sum over n of x[m, n] W[n, k]
//
// Kernels: quantized_tiles_<transposed|plain>_<dtype>_<format>, and
// quantized_tiles_<few|gated>_<dtype>_<format>_r<rows>.
// Grid: (blocks of columns of out, blocks of rows, batch). A block has 64 columns (transposed),
// 16 (few), 8 (gated), or 128 (plain), and 32 rows or `rows`. Threadgroup: 128 x 1 x 1.
// Bindings: x, w, scales, biases (x in place of absent ones), out, params; gated: x, gate w,
// scales, biases, up w, scales, biases, out, params.
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
// few: each simdgroup takes every fourth step and reads x itself (few_rows.h). Sums are added up in
// threadgroup memory. gated: the same, with a fragment of gate's rows and one of up's.
// plain: a lane has 8 codes of one row of w; four fragments are 32 columns of out.
#include "metal/common/activation.h"
#include "metal/common/kernel.h"
#include "metal/quantized_matmul/formats.h"
#include "metal/quantized_matmul/params.h"
#include "metal/quantized_matmul/tile_kernels.h"

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
  alignas(16) threadgroup Pair<T> tile[PairedRows<T>::kSize];
  tiles_transposed<T, Format>({w, scales, biases, 0, 0}, x, out, params, tile, group, simdgroup,
                              lane, thread_index);
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
  threadgroup float2 shares[kTiledSimdgroups][2][kRows / 8][32];
  tiles_few<T, Format, kRows>({w, scales, biases, 0, 0}, x, out, params, shares, group, simdgroup,
                              lane);
}

template <typename T, typename Format, int kRows>
[[kernel, max_total_threads_per_threadgroup(kTiledThreads)]] void quantized_tiles_gated(
    const device T* x [[buffer(0)]],
    const device uint* gate_w [[buffer(1)]],
    const device typename Format::template Scale<T>* gate_scales [[buffer(2)]],
    const device T* gate_biases [[buffer(3)]],
    const device uint* up_w [[buffer(4)]],
    const device typename Format::template Scale<T>* up_scales [[buffer(5)]],
    const device T* up_biases [[buffer(6)]],
    device T* out [[buffer(7)]],
    constant QuantizedParams& params [[buffer(8)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float2 shares[kTiledSimdgroups][2][kRows / 8][32];
  const TiledProduct<T, Format> gate = {
      x, {gate_w, gate_scales, gate_biases, 0, 0}, out, 0, params.rows};
  const TiledProduct<T, Format> up = {x, {up_w, up_scales, up_biases, 0, 0}, out, 0, params.rows};
  const int first_row = group.y * kRows;
  const FragmentPlace place = fragment_place(lane);
  const int output = kGatedOutputs * int(group.x) + place.row;
  const WeightRow<T, Format> own[2] = {gate.row_of_w(output, params), up.row_of_w(output, params)};
  float2 totals[2];
  products_of_few<T, Format, kRows>(gate.rows_of_x(first_row, kRows, params.columns), own, params,
                                    shares, simdgroup, lane, totals);
  if (int(simdgroup) >= kRows / 8) {
    return;
  }
  const uint zero = SumsOverflow<T>::kMay ? unknown_zero(lane) : 0;
  const int row = first_row + 8 * int(simdgroup) + place.column;
  MLX_ANVIL_UNROLL
  for (int e = 0; e < 2; ++e) {
    if (row + e < params.rows && output < params.outputs) {
      const float g = total_in_range(totals[0][e], gate, row + e, output, zero, params);
      const float u = total_in_range(totals[1][e], up, row + e, output, zero, params);
      out[uint(row + e) * uint(params.outputs) + uint(output)] =
          static_cast<T>(gated_value(params.activation, params.limit, g, u));
    }
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
  alignas(16) threadgroup Pair<T> tile[PairedColumns<T>::kSize];
  tiles_plain<T, Format>({w, scales, biases, 0, 0}, x, out, params, tile, group, simdgroup, lane,
                         thread_index);
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

#define INSTANTIATE_GATED(name, format, dtype, type)                \
  MLX_ANVIL_KERNEL("quantized_tiles_gated_" #dtype "_" #name "_r8", \
                   quantized_tiles_gated<type, format, 8>)

MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_GATED, float32, float)
MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_GATED, float16, half)
MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_GATED, bfloat16, bfloat)

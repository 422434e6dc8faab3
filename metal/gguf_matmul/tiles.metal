// Products with a matrix in GGUF's blocks for more than two rows of x (plain: eight), with weights
// dequantised in registers. See metal/quantized_matmul/tiles.metal, whose loops these kernels
// share.
//   gguf_tiles_transposed  out[m, n] = sum over k of x[m, k] W[n, k]
//   gguf_tiles_few         the same, for up to 8, 16 or 32 rows
//   gguf_tiles_plain       out[m, k] = sum over n of x[m, n] W[n, k]
//
// Kernels: gguf_tiles_<transposed|plain>_<dtype>_<format>, and
// gguf_tiles_few_<dtype>_<format>_r<rows>.
// Grid: (blocks of columns of out, blocks of rows, batch). A block has 64 columns (transposed), 16
// (few), or 128 (plain), and 32 rows or `rows`. Threadgroup: 128 x 1 x 1.
// Bindings: x, w, out, params.
// Function constants: 3: rows of x and of out consist of whole, aligned 16-byte vectors; 5: the
// summed dimension is a multiple of 64; 6: see codes.h. 0 is not read.
// Alignment: none beyond these. Arrays are dense, and have fewer than 2^32 elements.
//
//   for each step of 64 columns:
//     load 16 codes of two rows of w per lane; copy 32 x 64 of x; barrier
//     for each piece of 8 codes: for each of 4 fragments: sums += weights * x
//     barrier
//   store sums; compute those that have overflowed again
#include "metal/common/kernel.h"
#include "metal/gguf_matmul/formats.h"
#include "metal/gguf_matmul/rows.h"
#include "metal/quantized_matmul/tile_kernels.h"

template <typename T, typename Format>
[[kernel, max_total_threads_per_threadgroup(kTiledThreads)]] void gguf_tiles_transposed(
    const device T* x [[buffer(0)]],
    const device uchar* w [[buffer(1)]],
    device T* out [[buffer(2)]],
    constant QuantizedParams& params [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  alignas(16) threadgroup Pair<T> tile[PairedRows<T>::kSize];
  tiles_transposed<T, Format>({w, 0}, x, out, params, tile, group, simdgroup, lane, thread_index);
}

template <typename T, typename Format, int kRows>
[[kernel, max_total_threads_per_threadgroup(kTiledThreads)]] void gguf_tiles_few(
    const device T* x [[buffer(0)]],
    const device uchar* w [[buffer(1)]],
    device T* out [[buffer(2)]],
    constant QuantizedParams& params [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float2 shares[kTiledSimdgroups][2][kRows / 8][32];
  tiles_few<T, Format, kRows>({w, 0}, x, out, params, shares, group, simdgroup, lane);
}

template <typename T, typename Format>
[[kernel, max_total_threads_per_threadgroup(kTiledThreads)]] void gguf_tiles_plain(
    const device T* x [[buffer(0)]],
    const device uchar* w [[buffer(1)]],
    device T* out [[buffer(2)]],
    constant QuantizedParams& params [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  alignas(16) threadgroup Pair<T> tile[PairedColumns<T>::kSize];
  tiles_plain<T, Format>({w, 0}, x, out, params, tile, group, simdgroup, lane, thread_index);
}

// ---- kernels

#define INSTANTIATE_TILES(name, format, product, dtype, type) \
  MLX_ANVIL_KERNEL("gguf_tiles_" #product "_" #dtype "_" #name, gguf_tiles_##product<type, format>)

#define INSTANTIATE_TILES_DTYPES(product)                            \
  MLX_ANVIL_GGUF_FORMATS(INSTANTIATE_TILES, product, float32, float) \
  MLX_ANVIL_GGUF_FORMATS(INSTANTIATE_TILES, product, float16, half)  \
  MLX_ANVIL_GGUF_FORMATS(INSTANTIATE_TILES, product, bfloat16, bfloat)

INSTANTIATE_TILES_DTYPES(transposed)
INSTANTIATE_TILES_DTYPES(plain)

#define INSTANTIATE_FEW(name, format, dtype, type, rows)          \
  MLX_ANVIL_KERNEL("gguf_tiles_few_" #dtype "_" #name "_r" #rows, \
                   gguf_tiles_few<type, format, rows>)

#define INSTANTIATE_FEW_DTYPES(rows)                            \
  MLX_ANVIL_GGUF_FORMATS(INSTANTIATE_FEW, float32, float, rows) \
  MLX_ANVIL_GGUF_FORMATS(INSTANTIATE_FEW, float16, half, rows)  \
  MLX_ANVIL_GGUF_FORMATS(INSTANTIATE_FEW, bfloat16, bfloat, rows)

INSTANTIATE_FEW_DTYPES(8)
INSTANTIATE_FEW_DTYPES(16)
INSTANTIATE_FEW_DTYPES(32)

// Weights of a matrix in GGUF's blocks, with the bits of float32 arithmetic, then rounded to the
// dtype of out.
//   gguf_dequantize  out[r, c] = W[first_row + r, first_column + c], a block for a dense product
//   gguf_rows        out[i] = W[id[i]]. Ids out of range clamp to the first or last row.
//
// Kernels: gguf_<dequantize|rows>_<dtype>_<format>.
// Grid: dequantize: linear_grid(elements of out / 8, 256); a thread has eight columns. rows:
// (blocks of columns, ids or fewer). Threadgroup: 256 x 1 x 1; rows: 32 to 256 x 1 x 1. Bindings:
// dequantize: w, out, params; rows: ids (32 or 64 bits each), w, out, params. Function constants: 0
// (rows): rows of out consist of whole, aligned 16-byte vectors; 6: see codes.h. Alignment:
// dequantize: 16 bytes for out. Arrays are dense; blocks have fewer than 2^32 elements, and columns
// in multiples of eight.
//
//   (row, piece of 8 columns) = this thread
//   load the codes of the piece, its scale and minimum
//   out = scale * code - minimum, rounded
#include "metal/common/kernel.h"
#include "metal/gguf_matmul/formats.h"
#include "metal/gguf_matmul/rows.h"
#include "metal/quantized_embedding/piece.h"

#ifdef __MSLC__  // Apple's GPUs never launch these
template <typename T, typename Format>
[[kernel, max_total_threads_per_threadgroup(256)]] void gguf_dequantize(
    const device uchar* w [[buffer(0)]],
    device T* out [[buffer(1)]],
    constant QuantizedBlockParams& params [[buffer(2)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const uint piece = (group.y * groups.x + group.x) * 256 + thread_index;
  const uint pieces = uint(params.block_columns) / 8, row = piece / pieces;
  if (row >= uint(params.block_rows)) {
    return;
  }
  const WeightRow<T, Format> first = {w, 0};
  float weights[8];
  load_weights(weight_row(first, params.first_row + long(row), params.columns, 0),
               params.first_column + 8 * int(piece - row * pieces), params, weights);
  MLX_ANVIL_UNROLL
  for (int i = 0; i < 8; i += Pack<T>::kSize) {
    Pack<T>::store(out + 8 * ulong(piece) + i, weights + i);
  }
}
#endif

template <typename T, typename Format>
[[kernel, max_total_threads_per_threadgroup(256)]] void gguf_rows(
    const device uchar* ids [[buffer(0)]],
    const device uchar* w [[buffer(1)]],
    device T* out [[buffer(2)]],
    constant QuantizedEmbeddingParams& params [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint3 thread_in_group [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  const int column = int(group.x * threads.x + thread_in_group.x) * kPiece;
  if (column >= params.columns) {
    return;
  }
  const WeightRow<T, Format> first = {w, 0};
  const device uint* const words_of_ids = reinterpret_cast<const device uint*>(ids);
  for (long index = group.y; index < params.ids; index += groups.y) {
    const uint chosen = row_of_id(words_of_ids + index * params.words_per_id, params);
    float weights[kPiece];
    load_weights(weight_row(first, chosen, params.columns, 0), column, params, weights);
    store_piece(out + index * params.columns, uint(column), weights);
  }
}

// ---- kernels

#define INSTANTIATE_ROWS(name, format, dtype, type) \
  MLX_ANVIL_KERNEL("gguf_rows_" #dtype "_" #name, gguf_rows<type, format>)

MLX_ANVIL_GGUF_FORMATS(INSTANTIATE_ROWS, float32, float)
MLX_ANVIL_GGUF_FORMATS(INSTANTIATE_ROWS, float16, half)
MLX_ANVIL_GGUF_FORMATS(INSTANTIATE_ROWS, bfloat16, bfloat)

#ifdef __MSLC__
#define INSTANTIATE_DEQUANTIZE(name, format, dtype, type) \
  MLX_ANVIL_KERNEL("gguf_dequantize_" #dtype "_" #name, gguf_dequantize<type, format>)

MLX_ANVIL_GGUF_FORMATS(INSTANTIATE_DEQUANTIZE, float16, half)
MLX_ANVIL_GGUF_FORMATS(INSTANTIATE_DEQUANTIZE, bfloat16, bfloat)
#endif

// Gathers and dequantises rows of a quantized matrix: out[i] = W[id[i]].
// csrc/quantized_matmul/problem.h describes the formats. Only the requested rows are read. Ids out
// of range clamp to the first or last row.
//
// Kernels: quantized_embedding_rows_<dtype>_<format> on Apple's GPUs, and
// quantized_embedding_<dtype>_<format> on NVIDIA's.
// Grid: linear_grid(elements of out / 8, 256); a thread has eight columns. Threadgroup: 256 x 1 x
// 1. rows: (blocks of columns, ids or fewer). Threadgroup: 32 to 256 x 1 x 1.
// Bindings: ids (32 or 64 bits each), w, scales, biases (scales in place of absent ones), out,
// params.
// Function constant 0: see dequant.h, here for w and out.
// Alignment: none beyond function constant 0. Arrays are dense.
//
//   (index, piece of 8 columns) = this thread
//   row = id[index]; negative signed ids count from the end; clamp to the matrix
//   load the words of the piece, scale and bias
//   out = (code value * factor) * scale + bias
#include "metal/common/kernel.h"
#include "metal/quantized_embedding/piece.h"
#include "metal/quantized_matmul/formats.h"

// For the NaN code of mxfp8, Format::values() returns a value outside the range of the others.
template <typename Format>
METAL_FUNC float number_of(float value) {
  const bool is_e4m3 = Format::kBits == 8 && !Format::kHasBiases;
  return is_e4m3 && metal::abs(value) > 1.75f ? NAN : value;
}

// Dequantises a piece to elements `at` of `to`.
template <typename T, typename Format>
METAL_FUNC void store_weights(device T* to, uint at, const thread uint* words, float2 factors) {
  float values[kPiece];
  Format::values(words, 0, values);
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kPiece; ++i) {
    // Multiply by the factor first: factor * scale could overflow.
    const float value = number_of<Format>(values[i]) * Format::factor();
    values[i] = Format::kHasBiases ? metal::fma(value, factors.x, factors.y) : value * factors.x;
  }
  store_piece(to, at, values);
}

template <typename T, typename Format>
[[kernel, max_total_threads_per_threadgroup(256)]] void quantized_embedding(
    const device uchar* ids [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device typename Format::template Scale<T>* scales [[buffer(2)]],
    const device T* biases [[buffer(3)]],
    device T* out [[buffer(4)]],
    constant QuantizedEmbeddingParams& params [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint3 thread_in_group [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  const long piece = (long(group.y) * groups.x + group.x) * threads.x + thread_in_group.x;
  const int pieces = params.columns / kPiece;
  // A division of 64-bit numbers is hundreds of instructions on Apple's GPUs.
  const bool is_small = piece >> 32 == 0;
  const long index = is_small ? long(uint(piece) / uint(pieces)) : piece / pieces;
  if (index >= params.ids) {
    return;
  }
  const int column = static_cast<int>(piece - index * pieces) * kPiece;
  const WeightRow<T, Format> first = {w, scales, biases};
  const device uint* const id =
      reinterpret_cast<const device uint*>(ids) + index * params.words_per_id;
  const WeightRow<T, Format> row =
      weight_row(first, row_of_id(id, params), params.columns, params.group_shift);
  uint words[(kPiece * Format::kBits + 31) / 32];
  load_codes<Format, kPiece>(row, column, params.columns, words);
  const int shared = column >> params.group_shift;
  const float scale = Format::scale(row.scales[shared]);
  const float bias = Format::kHasBiases ? static_cast<float>(row.biases[shared]) : 0.0f;
  store_weights<T, Format>(out + index * params.columns + column, 0, words, float2(scale, bias));
}

template <typename T, typename Format>
[[kernel, max_total_threads_per_threadgroup(256)]] void quantized_embedding_rows(
    const device uchar* ids [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device typename Format::template Scale<T>* scales [[buffer(2)]],
    const device T* biases [[buffer(3)]],
    device T* out [[buffer(4)]],
    constant QuantizedEmbeddingParams& params [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint3 thread_in_group [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  const int column = int(group.x * threads.x + thread_in_group.x) * kPiece;
  if (column >= params.columns) {
    return;
  }
  const WeightRow<T, Format> first = {w, scales, biases, 0, 0};
  const device uint* const words_of_ids = reinterpret_cast<const device uint*>(ids);
  for (long index = group.y; index < params.ids; index += groups.y) {
    const uint chosen = row_of_id(words_of_ids + index * params.words_per_id, params);
    const WeightRow<T, Format> row = weight_row(first, chosen, params.columns, params.group_shift);
    uint words[(kPiece * Format::kBits + 31) / 32];
    load_codes<Format, kPiece>(row, column, params.columns, words);
    store_weights<T, Format>(out + index * params.columns, uint(column), words,
                             scale_and_bias(row, column >> params.group_shift));
  }
}

// ---- kernels

#define INSTANTIATE(format, Format, dtype, T)                      \
  MLX_ANVIL_KERNEL("quantized_embedding_rows_" #dtype "_" #format, \
                   quantized_embedding_rows<T, Format>)
MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE, float32, float)
MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE, float16, half)
MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE, bfloat16, bfloat)
#undef INSTANTIATE

#ifdef __MSLC__  // Apple's GPUs do not launch these
#define INSTANTIATE(format, Format, dtype, T) \
  MLX_ANVIL_KERNEL("quantized_embedding_" #dtype "_" #format, quantized_embedding<T, Format>)
MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE, float32, float)
MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE, float16, half)
MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE, bfloat16, bfloat)
#undef INSTANTIATE
#endif

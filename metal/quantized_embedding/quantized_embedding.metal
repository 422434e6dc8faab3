// Gathers and dequantises rows of a quantized matrix: out[i] = W[id[i]].
// csrc/quantized_matmul/problem.h describes the formats. Only the requested rows are read. Ids out
// of range clamp to the first or last row.
//
// Kernels: quantized_embedding_<dtype>_<format>.
// Grid: linear_grid(elements of out / 8, 256); a thread has eight columns. Threadgroup: 256 x 1 x
// 1.
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
#include "metal/quantized_embedding/params.h"
#include "metal/quantized_matmul/dequant.h"
#include "metal/quantized_matmul/formats.h"

enum { kPiece = 8 };

METAL_FUNC long row_of_id(const device uchar* bytes,
                          long index,
                          constant QuantizedEmbeddingParams& params) {
  const device uint* ids = reinterpret_cast<const device uint*>(bytes);
  const uint low = ids[index * params.words_per_id];
  const bool is_long = params.words_per_id == 2;
  const uint sign = params.ids_are_signed && (low >> 31) != 0 ? ~0u : 0u;
  const uint high = is_long ? ids[index * 2 + 1] : sign;
  const long id = static_cast<long>(static_cast<ulong>(high) << 32 | low);
  const long last = params.rows - 1;
  if (id < 0) {
    return params.ids_are_signed ? metal::max(id + params.rows, 0l) : last;
  }
  return metal::min(id, last);
}

// For the NaN code of mxfp8, Format::values() returns a value outside the range of the others.
template <typename Format>
METAL_FUNC float number_of(float value) {
  const bool is_e4m3 = Format::kBits == 8 && !Format::kHasBiases;
  return is_e4m3 && metal::abs(value) > 1.75f ? NAN : value;
}

template <typename T>
METAL_FUNC void store_piece(device T* to, const thread float* x) {
  if (rows_are_vectors) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kPiece; i += Pack<T>::kSize) {
      Pack<T>::store(to + i, x + i);
    }
  } else {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kPiece; ++i) {
      to[i] = static_cast<T>(x[i]);
    }
  }
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
  const WeightRow<T, Format> row =
      weight_row(first, row_of_id(ids, index, params), params.columns, params.group_shift);
  uint words[(kPiece * Format::kBits + 31) / 32];
  load_codes<Format, kPiece>(row, column, params.columns, words);
  const int shared = column >> params.group_shift;
  const float scale = Format::scale(row.scales[shared]);
  const float bias = Format::kHasBiases ? static_cast<float>(row.biases[shared]) : 0.0f;
  float values[kPiece];
  Format::values(words, 0, values);
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kPiece; ++i) {
    // Multiply by the factor first: factor * scale could overflow.
    const float value = number_of<Format>(values[i]) * Format::factor();
    values[i] = Format::kHasBiases ? metal::fma(value, scale, bias) : value * scale;
  }
  store_piece(out + index * params.columns + column, values);
}

// ---- kernels

#define INSTANTIATE(format, Format, dtype, T) \
  MLX_ANVIL_KERNEL("quantized_embedding_" #dtype "_" #format, quantized_embedding<T, Format>)

MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE, float32, float)
MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE, float16, half)
MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE, bfloat16, bfloat)

// Dequantises a block of w to 16 bits, for a dense product: out[r, c] = W[first_row + r,
// first_column + c], rounded once.
//
// Kernels: quantized_dequantize_<dtype>_<format>.
// Grid: linear_grid(elements of out / 8, 256); a thread has eight columns. Threadgroup: 256 x 1 x
// 1.
// Bindings: w, scales, biases (w in place of absent ones), out, params.
// Function constant 0: see dequant.h.
// Alignment: out 16 bytes. Arrays are dense; blocks have fewer than 2^32 elements, and columns in
// multiples of eight.
//
//   (row, piece of 8 columns) = this thread
//   load the codes of the piece, its scale and bias
//   out = value(code) * scale + bias, rounded
#ifdef __MSLC__  // Apple's GPUs never launch these
#include "metal/common/kernel.h"
#include "metal/quantized_matmul/dequant.h"
#include "metal/quantized_matmul/formats.h"
#include "metal/quantized_matmul/params.h"

template <typename T, typename Format>
[[kernel, max_total_threads_per_threadgroup(256)]] void quantized_dequantize(
    const device uint* w [[buffer(0)]],
    const device typename Format::template Scale<T>* scales [[buffer(1)]],
    const device T* biases [[buffer(2)]],
    device T* out [[buffer(3)]],
    constant QuantizedBlockParams& params [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const uint piece = (group.y * groups.x + group.x) * 256 + thread_index;
  const uint pieces = uint(params.block_columns) / 8, row = piece / pieces;
  if (row >= uint(params.block_rows)) {
    return;
  }
  const WeightRow<T, Format> first = {w, scales, biases};
  float weights[8];
  load_weights(weight_row<T, Format>(first, params.first_row + long(row), params.columns,
                                     params.group_shift),
               params.first_column + 8 * int(piece - row * pieces), params, weights);
  MLX_ANVIL_UNROLL
  for (int i = 0; i < 8; i += Pack<T>::kSize) {
    Pack<T>::store(out + 8 * ulong(piece) + i, weights + i);
  }
}
#endif

// ---- kernels

#ifdef __MSLC__
#define INSTANTIATE_DEQUANTIZE(format, Format, dtype, T) \
  MLX_ANVIL_KERNEL("quantized_dequantize_" #dtype "_" #format, quantized_dequantize<T, Format>)

MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_DEQUANTIZE, float16, half)
MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_DEQUANTIZE, bfloat16, bfloat)
#endif

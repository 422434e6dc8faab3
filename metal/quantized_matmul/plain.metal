// Untransposed quantized product for up to 8 rows of x, as in the gradient of a decode step. Each
// word of w is read once for all rows.
//   out[m, k] = sum over n of x[m, n] W[n, k]
//
// Kernels: quantized_plain_<dtype>_<format>_r<rows>, for at most that many rows.
// Grid: (blocks of 32 * PlainColumns columns, parts, batch). Threadgroup: 256 x 1 x 1; its
// simdgroups take rows of w in turn, 32 at a time.
// Bindings: x, w, scales, biases (x in place of absent ones), out, params.
// Function constants: 0: see dequant.h; 2: the rows of w are split into parts (split-K). Then out
// is float32 scratch, [parts, batch, rows, K].
// Alignment: none beyond function constant 0. Arrays are dense.
//
//   for each 32 rows of w of this simdgroup:
//     load 32 elements of each row of x, one per lane
//     for each row n of w: broadcast x[m, n]; products[m] += (scale x[m, n]) * codes;
//                          shifts[m] += bias * x[m, n]
//   total = products + shifts; add up the simdgroups in threadgroup memory
//   compute totals that have overflowed again    (large_numbers.h)
//   store out, or the part
//
// Kernels: quantized_sum_parts_<dtype>, which adds up the parts in order.
// Grid: blocks of 256 elements of out. Threadgroup: 256.
// Bindings: parts, out, params. Function constant 0: false.
#include "metal/common/kernel.h"
#include "metal/quantized_matmul/formats.h"
#include "metal/quantized_matmul/params.h"
#include "metal/quantized_matmul/plain_sums.h"

template <typename T, typename Format, int kRows>
[[kernel, max_total_threads_per_threadgroup(kPlainThreads)]] void quantized_plain(
    const device T* x [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device typename Format::template Scale<T>* scales [[buffer(2)]],
    const device T* biases [[buffer(3)]],
    device T* out [[buffer(4)]],
    constant QuantizedParams& params [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float shares[kRows * PlainColumns<Format, kRows>::kCount][33];
  plain_of_place<T, Format, kRows>({w, scales, biases, 0, 0}, x, out, params, shares, group, groups,
                                   simdgroup, lane, thread_index);
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kPlainThreads)]] void quantized_sum_parts(
    const device float* parts [[buffer(0)]],
    device T* out [[buffer(1)]],
    constant QuantizedSumParams& params [[buffer(2)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const long i = (long(group.y) * groups.x + group.x) * kPlainThreads + thread_index;
  if (i >= params.size) {
    return;
  }
  float sum = 0.0f;
  for (int part = 0; part < params.parts; ++part) {
    sum += parts[part * params.size + i];
  }
  out[i] = static_cast<T>(sum);
}

// ---- kernels

#define INSTANTIATE_PLAIN(name, format, dtype, type, rows)         \
  MLX_ANVIL_KERNEL("quantized_plain_" #dtype "_" #name "_r" #rows, \
                   quantized_plain<type, format, rows>)

#define INSTANTIATE_PLAIN_DTYPE(dtype, type)                     \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_PLAIN, dtype, type, 1) \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_PLAIN, dtype, type, 2) \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_PLAIN, dtype, type, 4) \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_PLAIN, dtype, type, 8) \
  MLX_ANVIL_KERNEL("quantized_sum_parts_" #dtype, quantized_sum_parts<type>)

INSTANTIATE_PLAIN_DTYPE(float32, float)
INSTANTIATE_PLAIN_DTYPE(float16, half)
INSTANTIATE_PLAIN_DTYPE(bfloat16, bfloat)

// Untransposed product with a matrix in GGUF's blocks for up to 8 rows of x, as in the gradient of
// a decode step. Each byte of w is read once for all rows.
//   out[m, k] = sum over n of x[m, n] W[n, k]
//
// Kernels: gguf_plain_<dtype>_<format>_r<rows>, for at most that many rows.
// Grid: (blocks of 512 columns, or 256 for eight rows, parts, batch). Threadgroup: 256 x 1 x 1; its
// simdgroups take rows of w in turn, 32 at a time.
// Bindings: x, w, out, params.
// Function constants: 2: the rows of w are split into parts (split-K). Then out is float32 scratch,
// [parts, batch, rows, K], which quantized_sum_parts adds up. 6: see codes.h. 0 is not read.
// Alignment: none beyond function constant 6. Arrays are dense.
//
//   for each 32 rows of w of this simdgroup:
//     load 32 elements of each row of x, one per lane
//     for each row n of w: broadcast x[m, n]; products[m] += (scale x[m, n]) * codes;
//                          shifts[m] += bias * x[m, n]
//   total = products + shifts; add up the simdgroups in threadgroup memory
//   compute totals that have overflowed again    (large_numbers.h)
//   store out, or the part
#include "metal/common/kernel.h"
#include "metal/gguf_matmul/formats.h"
#include "metal/gguf_matmul/rows.h"
#include "metal/quantized_matmul/plain_sums.h"

template <typename T, typename Codes, int kRows>
struct PlainSums<T, GgufFormat<Codes>, kRows> : PlainTotals<GgufFormat<Codes>, kRows> {
  enum { kColumns = PlainTotals<GgufFormat<Codes>, kRows>::kColumns };

  // Adds x[m] times a row of w, from `column` on.
  METAL_FUNC void add(WeightRow<T, GgufFormat<Codes>> row,
                      const thread float* x,
                      constant QuantizedParams&,
                      int column) thread {
    LaneWeights<T, GgufFormat<Codes>, kColumns> weights;
    weights.load(row, column);
    float scaled[kRows];
    MLX_ANVIL_UNROLL
    for (int m = 0; m < kRows; ++m) {
      scaled[m] = weights.scale * (Codes::factor() * x[m]);
      if (Codes::kHasMins) {
        this->shifts[m][0] = metal::fma(weights.bias, x[m], this->shifts[m][0]);
      }
    }
    MLX_ANVIL_UNROLL
    for (int piece = 0; piece < kColumns / 8; ++piece) {
      float v[8];
      weights.codes(piece, v);
      MLX_ANVIL_UNROLL
      for (int m = 0; m < kRows; ++m) {
        MLX_ANVIL_UNROLL
        for (int i = 0; i < 8; ++i) {
          thread float& product = this->products[m][8 * piece + i];
          product = metal::fma(v[i], scaled[m], product);
        }
      }
    }
  }
};

template <typename T, typename Format, int kRows>
[[kernel, max_total_threads_per_threadgroup(kPlainThreads)]] void gguf_plain(
    const device T* x [[buffer(0)]],
    const device uchar* w [[buffer(1)]],
    device T* out [[buffer(2)]],
    constant QuantizedParams& params [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float shares[kRows * PlainColumns<Format, kRows>::kCount][33];
  plain_of_place<T, Format, kRows>({w, 0}, x, out, params, shares, group, groups, simdgroup, lane,
                                   thread_index);
}

// ---- kernels

#define INSTANTIATE_PLAIN(name, format, dtype, type, rows) \
  MLX_ANVIL_KERNEL("gguf_plain_" #dtype "_" #name "_r" #rows, gguf_plain<type, format, rows>)

#define INSTANTIATE_PLAIN_DTYPES(rows)                            \
  MLX_ANVIL_GGUF_FORMATS(INSTANTIATE_PLAIN, float32, float, rows) \
  MLX_ANVIL_GGUF_FORMATS(INSTANTIATE_PLAIN, float16, half, rows)  \
  MLX_ANVIL_GGUF_FORMATS(INSTANTIATE_PLAIN, bfloat16, bfloat, rows)

INSTANTIATE_PLAIN_DTYPES(1)
INSTANTIATE_PLAIN_DTYPES(2)
INSTANTIATE_PLAIN_DTYPES(4)
INSTANTIATE_PLAIN_DTYPES(8)

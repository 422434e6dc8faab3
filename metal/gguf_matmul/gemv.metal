// Products of up to 8 rows of x with a matrix in GGUF's blocks:
//   out[m, n] = sum over k of x[m, k] W[n, k]
//
// Kernels: gguf_gemv_<dtype>_<format>_r<rows>, for at most that many rows.
// Grid: (blocks of rows of w, blocks of rows of x, batch). A simdgroup processes four rows of w, or
// two for eight rows of x. Threadgroup: 128 x 1 x 1.
// Bindings: x, w, out, params.
// Function constants: 0: see dequant.h, here for x; 1: see gemv.h; 6: see codes.h.
// Alignment: none beyond function constants 0 and 6. Arrays are dense; w has fewer than 2^32 bytes.
//
//   place = first row of x, first row of w and first chunk of this lane
//   totals = products of kStreams rows of w with kRows rows of x     (pseudocode in gemv_sums.h)
//   lane i stores total i
#include "metal/common/kernel.h"
#include "metal/gguf_matmul/formats.h"
#include "metal/gguf_matmul/gemv_sums.h"

template <typename T, typename Format, int kRows>
[[kernel, max_total_threads_per_threadgroup(kGemvThreads)]] void gguf_gemv(
    const device T* x [[buffer(0)]],
    const device uchar* w [[buffer(1)]],
    device T* out [[buffer(2)]],
    constant QuantizedParams& params [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  enum { kStreams = GemvStreams<kRows>::kCount };
  threadgroup float shares[kGemvSimdgroups][32];
  const long batch = group.z;
  const GemvPlace place = gemv_place(group, simdgroup, lane, kRows, kStreams);
  const float total =
      gemv_of_place<T, Format, kRows>({w, 0}, x, params, place, simdgroup, lane, shares);
  const int m = place.first_row + lane / kStreams;
  const int n = place.first_output + lane % kStreams;
  if (stores_results(simdgroup) && lane < kRows * kStreams && m < params.rows &&
      n < params.outputs) {
    out[(batch * params.rows + m) * params.outputs + n] = static_cast<T>(total);
  }
}

// ---- kernels

#define INSTANTIATE_GEMV(name, format, dtype, type, rows) \
  MLX_ANVIL_KERNEL("gguf_gemv_" #dtype "_" #name "_r" #rows, gguf_gemv<type, format, rows>)

#define INSTANTIATE_GEMV_DTYPES(rows)                            \
  MLX_ANVIL_GGUF_FORMATS(INSTANTIATE_GEMV, float32, float, rows) \
  MLX_ANVIL_GGUF_FORMATS(INSTANTIATE_GEMV, float16, half, rows)  \
  MLX_ANVIL_GGUF_FORMATS(INSTANTIATE_GEMV, bfloat16, bfloat, rows)

INSTANTIATE_GEMV_DTYPES(1)
INSTANTIATE_GEMV_DTYPES(2)
INSTANTIATE_GEMV_DTYPES(4)
INSTANTIATE_GEMV_DTYPES(8)

// Quantized GEMV for up to 8 rows of x. Each word of w is read once for all rows.
//   quantized_gemv    out[m, n] = sum over k of x[m, k] W[n, k]
//   quantized_swiglu  out[m, n] = activation(g) * u,  g and u: such products with gate and up
//
// Kernels: quantized_<gemv|swiglu>_<dtype>_<format>_r<rows>, for at most that many rows.
// Grid: (blocks of rows of w, blocks of rows of x, batch). A simdgroup processes four rows of w, or
// two for eight rows of x (swiglu: half as many of each matrix). Threadgroup: 128 x 1 x 1.
// Bindings:
//   gemv:   x, w, scales, biases, out, params
//   swiglu: x, gate w, scales, biases, up w, scales, biases, out, params
// Formats without biases bind x in their place. Function constants: 0: see dequant.h; 1: see
// gemv.h.
// Alignment: none beyond function constant 0. Arrays are dense.
//
//   place = first row of x, first row of w and first chunk of this lane
//   totals = products of kStreams rows of w with kRows rows of x      (pseudocode in gemv.h)
//   gemv:   lane i stores total i
//   swiglu: lane i fetches up from lane i + kStreams / 2, and stores activation(gate) * up
#include "metal/common/activation.h"
#include "metal/common/kernel.h"
#include "metal/quantized_matmul/formats.h"
#include "metal/quantized_matmul/gemv.h"

template <typename T, typename Format, int kRows>
[[kernel, max_total_threads_per_threadgroup(kGemvThreads)]] void quantized_gemv(
    const device T* x [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device typename Format::template Scale<T>* scales [[buffer(2)]],
    const device T* biases [[buffer(3)]],
    device T* out [[buffer(4)]],
    constant QuantizedParams& params [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  enum { kStreams = GemvStreams<kRows>::kCount };
  threadgroup float shares[kGemvSimdgroups][32];
  const long batch = group.z;
  const GemvPlace place = gemv_place(group, simdgroup, lane, kRows, kStreams);
  const float total = gemv_of_place<T, Format, kRows>({w, scales, biases}, x, params, place,
                                                      simdgroup, lane, shares);
  const int m = place.first_row + lane / kStreams;
  const int n = place.first_output + lane % kStreams;
  if (stores_results(simdgroup) && lane < kRows * kStreams && m < params.rows &&
      n < params.outputs) {
    out[(batch * params.rows + m) * params.outputs + n] = static_cast<T>(total);
  }
}

template <typename T, typename Format, int kRows>
[[kernel, max_total_threads_per_threadgroup(kGemvThreads)]] void quantized_swiglu(
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
  enum { kStreams = GemvStreams<kRows>::kCount, kPairs = kStreams / 2 };
  threadgroup float shares[kGemvSimdgroups][32];
  const GemvPlace place = gemv_place(group, simdgroup, lane, kRows, kPairs);
  const GateAndUp<T, Format, kPairs> matrices = {{gate_w, gate_scales, gate_biases},
                                                 {up_w, up_scales, up_biases}};
  const float gate =
      gemv_totals<T, Format, kRows>(matrices, x, params, place, simdgroup, lane, shares);
  const float up = metal::simd_shuffle_down(gate, ushort(kPairs));
  const int m = place.first_row + lane / kStreams;
  const int pair = lane % kStreams, n = place.first_output + pair;
  if (stores_results(simdgroup) && lane < kRows * kStreams && m < params.rows && pair < kPairs &&
      n < params.outputs) {
    out[long(m) * params.outputs + n] =
        static_cast<T>(gated_value(params.activation, params.limit, gate, up));
  }
}

// ---- kernels

#define INSTANTIATE_GEMV(name, format, kernel_name, dtype, type, rows) \
  MLX_ANVIL_KERNEL(#kernel_name "_" #dtype "_" #name "_r" #rows, kernel_name<type, format, rows>)

#define INSTANTIATE_GEMV_DTYPES(kernel_name, rows)                                 \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_GEMV, kernel_name, float32, float, rows) \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_GEMV, kernel_name, float16, half, rows)  \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_GEMV, kernel_name, bfloat16, bfloat, rows)

INSTANTIATE_GEMV_DTYPES(quantized_gemv, 1)
INSTANTIATE_GEMV_DTYPES(quantized_gemv, 2)
INSTANTIATE_GEMV_DTYPES(quantized_gemv, 4)
INSTANTIATE_GEMV_DTYPES(quantized_gemv, 8)
INSTANTIATE_GEMV_DTYPES(quantized_swiglu, 1)
INSTANTIATE_GEMV_DTYPES(quantized_swiglu, 2)
#ifdef __MSLC__  // Apple's GPUs multiply 3 to 8 gated rows by tiles.metal
INSTANTIATE_GEMV_DTYPES(quantized_swiglu, 4)
INSTANTIATE_GEMV_DTYPES(quantized_swiglu, 8)
#endif

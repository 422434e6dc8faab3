// Quantized products of up to 8 rows of x by matrix products: what gemv.metal computes, for affine
// codes of 4 bits and 16-bit x.
//
// Kernels: quantized_<gemv|swiglu>_matrix_<dtype>_g<codes of a group>_n<rows of w>. Bindings: those
// of gemv.metal. Function constant 0: true (see below). Grid: blocks of so many rows of w (swiglu:
// of half as many of each matrix) x blocks of 8 rows of x x batch. Threadgroup: 128 x 1 x 1. Arrays
// are dense, aligned to 16 bytes, and K is a multiple of 256.
#include "metal/common/activation.h"
#include "metal/quantized_matmul/gemv_matrix.h"
#include "metal/quantized_matmul/params.h"

// Eight rows of a matrix from `first` on.
template <typename T>
METAL_FUNC FragmentRows<T> fragment_rows(WeightRow<T, AffineFormat<4>> matrix,
                                         int first,
                                         constant QuantizedParams& params) {
  return {matrix, first, params.outputs - 1, params.columns / 8,
          params.columns >> params.group_shift};
}

// Sums of all columns. x: of this batch.
template <typename T, int kGroup, int kFragments>
METAL_FUNC GemvMatrixSums<T, kGroup, kFragments> matrix_sums(
    const thread FragmentRows<T> (&rows)[kFragments],
    const device T* x,
    constant QuantizedParams& params,
    int first_row,
    uint simdgroup,
    uint lane,
    threadgroup uint4* stages,
    threadgroup float2 (*shares)[kFragments][32]) {
  GemvMatrixSums<T, kGroup, kFragments> sums;
  sums.place = fragment_place(lane);
  sums.clear();
  const int row = metal::min(first_row + sums.place.row, params.rows - 1);
  sums.add(rows, x + long(row) * params.columns, params.columns, simdgroup, lane,
           stages + simdgroup * (2 * MatrixStage<T, kGroup, kFragments>::kCount));
  add_shares(sums, shares, simdgroup, lane);
  return sums;
}

// Element n of x's row m and the next row, where they exist. out: of this batch.
template <typename T>
METAL_FUNC void store_two_rows(
    device T* out, int m, int n, float2 values, constant QuantizedParams& params) {
  MLX_ANVIL_UNROLL
  for (int e = 0; e < 2; ++e) {
    if (m + e < params.rows && n < params.outputs) {
      out[long(m + e) * params.outputs + n] = static_cast<T>(values[e]);
    }
  }
}

template <typename T, int kGroup, int kFragments>
[[kernel, max_total_threads_per_threadgroup(kMatrixThreadsOfRegisters)]] void quantized_gemv_matrix(
    const device T* x [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device T* scales [[buffer(2)]],
    const device T* biases [[buffer(3)]],
    device T* out [[buffer(4)]],
    constant QuantizedParams& params [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint4 stages[kMatrixSimdgroups * 2 * MatrixStage<T, kGroup, kFragments>::kCount];
  threadgroup float2 shares[kMatrixSimdgroups][kFragments][32];
  const long batch = group.z;
  const int first_row = kMatrixRows * group.y, first_output = 8 * kFragments * group.x;
  const FragmentPlace place = fragment_place(lane);
  const auto matrix = weight_row<T, AffineFormat<4>>({w, scales, biases}, batch * params.outputs,
                                                     params.columns, params.group_shift);
  FragmentRows<T> rows[kFragments];
  MLX_ANVIL_UNROLL
  for (int f = 0; f < kFragments; ++f) {
    rows[f] = fragment_rows<T>(matrix, first_output + 8 * f, params);
  }
  const GemvMatrixSums<T, kGroup, kFragments> sums =
      matrix_sums<T, kGroup, kFragments>(rows, x + batch * params.rows * params.columns, params,
                                         first_row, simdgroup, lane, stages, shares);
  if (simdgroup != 0) {
    return;
  }
  MLX_ANVIL_UNROLL
  for (int f = 0; f < kFragments; ++f) {
    store_two_rows(out + batch * params.rows * params.outputs, first_row + place.column,
                   first_output + 8 * f + place.row, sums.totals[f], params);
  }
}

// Half of the fragments are rows of gate, and half the same rows of up.
template <typename T, int kGroup, int kFragments>
[[kernel, max_total_threads_per_threadgroup(kMatrixThreadsOfRegisters)]] void
quantized_swiglu_matrix(const device T* x [[buffer(0)]],
                        const device uint* gate_w [[buffer(1)]],
                        const device T* gate_scales [[buffer(2)]],
                        const device T* gate_biases [[buffer(3)]],
                        const device uint* up_w [[buffer(4)]],
                        const device T* up_scales [[buffer(5)]],
                        const device T* up_biases [[buffer(6)]],
                        device T* out [[buffer(7)]],
                        constant QuantizedParams& params [[buffer(8)]],
                        uint3 group [[threadgroup_position_in_grid]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]]) {
  enum { kHalf = kFragments / 2 };
  threadgroup uint4 stages[kMatrixSimdgroups * 2 * MatrixStage<T, kGroup, kFragments>::kCount];
  threadgroup float2 shares[kMatrixSimdgroups][kFragments][32];
  const int first_row = kMatrixRows * group.y, first_output = 4 * kFragments * group.x;
  const FragmentPlace place = fragment_place(lane);
  FragmentRows<T> rows[kFragments];
  MLX_ANVIL_UNROLL
  for (int f = 0; f < kHalf; ++f) {
    const int first = first_output + 8 * f;
    rows[f] = fragment_rows<T>({gate_w, gate_scales, gate_biases}, first, params);
    rows[f + kHalf] = fragment_rows<T>({up_w, up_scales, up_biases}, first, params);
  }
  const GemvMatrixSums<T, kGroup, kFragments> sums = matrix_sums<T, kGroup, kFragments>(
      rows, x, params, first_row, simdgroup, lane, stages, shares);
  if (simdgroup != 0) {
    return;
  }
  MLX_ANVIL_UNROLL
  for (int f = 0; f < kHalf; ++f) {
    const float2 gate = sums.totals[f], up = sums.totals[f + kHalf];
    const float2 values =
        float2(gate.x * sigmoid(gate.x).value * up.x, gate.y * sigmoid(gate.y).value * up.y);
    store_two_rows(out, first_row + place.column, first_output + 8 * f + place.row, values, params);
  }
}

#define INSTANTIATE_GEMV_MATRIX(kernel_name, dtype, type, group, rows, fragments) \
  template [[host_name(#kernel_name "_" #dtype "_g" #group "_n" #rows)]]          \
  [[kernel]] decltype(kernel_name<type, group, fragments>) kernel_name<type, group, fragments>;

#define INSTANTIATE_GEMV_MATRIX_GROUPS(kernel_name, dtype, type) \
  INSTANTIATE_GEMV_MATRIX(kernel_name, dtype, type, 32, 16, 2)   \
  INSTANTIATE_GEMV_MATRIX(kernel_name, dtype, type, 64, 16, 2)   \
  INSTANTIATE_GEMV_MATRIX(kernel_name, dtype, type, 128, 16, 2)

INSTANTIATE_GEMV_MATRIX_GROUPS(quantized_gemv_matrix, float16, half)
INSTANTIATE_GEMV_MATRIX_GROUPS(quantized_gemv_matrix, bfloat16, bfloat)
INSTANTIATE_GEMV_MATRIX_GROUPS(quantized_swiglu_matrix, float16, half)
INSTANTIATE_GEMV_MATRIX_GROUPS(quantized_swiglu_matrix, bfloat16, bfloat)

// For matrices of very many rows. Factors of groups of 32 would take more registers than there are.
#define INSTANTIATE_TALL_GEMV_MATRIX(dtype, type)                        \
  INSTANTIATE_GEMV_MATRIX(quantized_gemv_matrix, dtype, type, 64, 24, 3) \
  INSTANTIATE_GEMV_MATRIX(quantized_gemv_matrix, dtype, type, 128, 24, 3)

INSTANTIATE_TALL_GEMV_MATRIX(float16, half)
INSTANTIATE_TALL_GEMV_MATRIX(bfloat16, bfloat)

// Quantized products of up to 8 rows of x by matrix products: what gemv.metal computes, for affine
// codes of 4 bits and 16-bit x.
//
// Kernels: quantized_<gemv|swiglu>_matrix_<dtype>_g<codes of a group>. Bindings: those of
// gemv.metal. Function constants: 0: true (see below); 1: of gemv.h. Grid: blocks of rows of
// w x blocks of 8 rows of x x batch; a SIMD group takes 32 rows of w (swiglu: 16 of each matrix).
// Threadgroup: 128 x 1 x 1. Arrays are dense, aligned to 16 bytes, and K is a multiple of 256.
#include "metal/common/activation.h"
#include "metal/quantized_matmul/gemv_matrix.h"
#include "metal/quantized_matmul/params.h"

struct MatrixPlace {
  int first_row;     // of x
  int first_output;  // row of w
  int first_step;    // of columns
  int step;
};

// outputs: rows of a matrix that a SIMD group takes.
METAL_FUNC MatrixPlace matrix_place(uint3 group, uint simdgroup, int outputs) {
  const int row = 8 * int(group.y);
  if (columns_are_shared) {
    return {row, int(group.x) * outputs, int(simdgroup), kMatrixSimdgroups};
  }
  return {row, int(group.x * kMatrixSimdgroups + simdgroup) * outputs, 0, 1};
}

// Row `row` of a matrix, or its last one.
template <typename T>
METAL_FUNC WeightRow<T, AffineFormat<4>> matrix_row(WeightRow<T, AffineFormat<4>> first,
                                                    long batch,
                                                    int row,
                                                    constant QuantizedParams& params) {
  return weight_row<T, AffineFormat<4>>(
      first, batch * params.outputs + metal::min(row, params.outputs - 1), params.columns,
      params.group_shift);
}

// Sums of all columns. x: of this batch.
template <typename T, int kGroup>
METAL_FUNC GemvMatrixSums<T, kGroup> matrix_sums(
    const thread WeightRow<T, AffineFormat<4>> (&rows)[kMatrixFragments],
    const device T* x,
    constant QuantizedParams& params,
    MatrixPlace at,
    uint simdgroup,
    uint lane,
    threadgroup float2 (*shares)[kMatrixFragments][32]) {
  GemvMatrixSums<T, kGroup> sums;
  sums.place = fragment_place(lane);
  sums.clear();
  const int row = metal::min(at.first_row + sums.place.row, params.rows - 1);
  sums.add(rows, x + long(row) * params.columns, params.columns, at.first_step, at.step);
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

template <typename T, int kGroup>
[[kernel, max_total_threads_per_threadgroup(kMatrixThreads)]] void quantized_gemv_matrix(
    const device T* x [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device T* scales [[buffer(2)]],
    const device T* biases [[buffer(3)]],
    device T* out [[buffer(4)]],
    constant QuantizedParams& params [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float2 shares[kMatrixSimdgroups][kMatrixFragments][32];
  const long batch = group.z;
  const MatrixPlace at = matrix_place(group, simdgroup, kMatrixOutputs);
  const FragmentPlace place = fragment_place(lane);
  WeightRow<T, AffineFormat<4>> rows[kMatrixFragments];
  MLX_ANVIL_UNROLL
  for (int f = 0; f < kMatrixFragments; ++f) {
    rows[f] =
        matrix_row<T>({w, scales, biases}, batch, at.first_output + 8 * f + place.row, params);
  }
  const GemvMatrixSums<T, kGroup> sums = matrix_sums<T, kGroup>(
      rows, x + batch * params.rows * params.columns, params, at, simdgroup, lane, shares);
  if (!stores_results(simdgroup)) {
    return;
  }
  MLX_ANVIL_UNROLL
  for (int f = 0; f < kMatrixFragments; ++f) {
    store_two_rows(out + batch * params.rows * params.outputs, at.first_row + place.column,
                   at.first_output + 8 * f + place.row, sums.totals[f], params);
  }
}

// Half of the fragments are rows of gate, and half the same rows of up.
template <typename T, int kGroup>
[[kernel, max_total_threads_per_threadgroup(kMatrixThreads)]] void quantized_swiglu_matrix(
    const device T* x [[buffer(0)]],
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
  enum { kHalf = kMatrixFragments / 2 };
  threadgroup float2 shares[kMatrixSimdgroups][kMatrixFragments][32];
  const MatrixPlace at = matrix_place(group, simdgroup, kMatrixOutputs / 2);
  const FragmentPlace place = fragment_place(lane);
  WeightRow<T, AffineFormat<4>> rows[kMatrixFragments];
  MLX_ANVIL_UNROLL
  for (int f = 0; f < kHalf; ++f) {
    const int row = at.first_output + 8 * f + place.row;
    rows[f] = matrix_row<T>({gate_w, gate_scales, gate_biases}, 0, row, params);
    rows[f + kHalf] = matrix_row<T>({up_w, up_scales, up_biases}, 0, row, params);
  }
  const GemvMatrixSums<T, kGroup> sums =
      matrix_sums<T, kGroup>(rows, x, params, at, simdgroup, lane, shares);
  if (!stores_results(simdgroup)) {
    return;
  }
  MLX_ANVIL_UNROLL
  for (int f = 0; f < kHalf; ++f) {
    const float2 gate = sums.totals[f], up = sums.totals[f + kHalf];
    const float2 values =
        float2(gate.x * sigmoid(gate.x).value * up.x, gate.y * sigmoid(gate.y).value * up.y);
    store_two_rows(out, at.first_row + place.column, at.first_output + 8 * f + place.row, values,
                   params);
  }
}

#define INSTANTIATE_GEMV_MATRIX(kernel_name, dtype, type, group) \
  template [[host_name(#kernel_name "_" #dtype "_g" #group)]]    \
  [[kernel]] decltype(kernel_name<type, group>) kernel_name<type, group>;

#define INSTANTIATE_GEMV_MATRIX_GROUPS(kernel_name, dtype, type) \
  INSTANTIATE_GEMV_MATRIX(kernel_name, dtype, type, 32)          \
  INSTANTIATE_GEMV_MATRIX(kernel_name, dtype, type, 64)          \
  INSTANTIATE_GEMV_MATRIX(kernel_name, dtype, type, 128)

INSTANTIATE_GEMV_MATRIX_GROUPS(quantized_gemv_matrix, float16, half)
INSTANTIATE_GEMV_MATRIX_GROUPS(quantized_gemv_matrix, bfloat16, bfloat)
INSTANTIATE_GEMV_MATRIX_GROUPS(quantized_swiglu_matrix, float16, half)
INSTANTIATE_GEMV_MATRIX_GROUPS(quantized_swiglu_matrix, bfloat16, bfloat)

// Quantized products of up to 8 rows of x by matrix products: what gemv.metal computes, for affine
// codes of 4 bits and 16-bit x.
//
// Kernels: quantized_gemv_matrix_<dtype>_g<codes of a group>. Bindings: those of
// gemv.metal. Function constant 0: true (see below); 1: of gemv.h. Grid: blocks of rows of w x
// blocks of 8 rows of x x batch; a SIMD group takes 16 rows of w.
// Threadgroup: 128 x 1 x 1. Arrays are dense, and rows of x and w runs of whole, aligned vectors.
#include "metal/quantized_matmul/gemv_matrix.h"

template <typename T, int kGroup>
[[kernel, max_total_threads_per_threadgroup(kGemvThreads)]] void quantized_gemv_matrix(
    const device T* x [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device T* scales [[buffer(2)]],
    const device T* biases [[buffer(3)]],
    device T* out [[buffer(4)]],
    constant QuantizedParams& params [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Sums = GemvMatrixSums<T, kGroup>;
  threadgroup uint4 tiles[kGemvSimdgroups][Sums::kTileVectors];
  threadgroup float2 shares[kGemvSimdgroups][2][32];
  const long batch = group.z;
  const GemvPlace at = gemv_place(group, simdgroup, lane, Sums::kRows, 16);
  Sums sums;
  sums.place = fragment_place(lane);
  sums.clear();
  typename Sums::Row rows[2];
  MLX_ANVIL_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int output = metal::min(at.first_output + 8 * r + sums.place.row, params.outputs - 1);
    rows[r] = weight_row<T, AffineFormat<4>>({w, scales, biases}, batch * params.outputs + output,
                                             params.columns, params.group_shift);
  }
  sums.add(rows, x + batch * params.rows * params.columns, tiles[simdgroup], params, at, lane);
  add_shares(sums, shares, simdgroup, lane);
  if (!stores_results(simdgroup)) {
    return;
  }
  MLX_ANVIL_UNROLL
  for (int r = 0; r < 2; ++r) {
    MLX_ANVIL_UNROLL
    for (int e = 0; e < 2; ++e) {
      const int m = at.first_row + sums.place.column + e;
      const int n = at.first_output + 8 * r + sums.place.row;
      if (m < params.rows && n < params.outputs) {
        out[(batch * params.rows + m) * params.outputs + n] = static_cast<T>(sums.totals[r][e]);
      }
    }
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

// Quantized GEMV for up to 8 rows of x on matrix units: the same products as gemv.metal, for 4-bit
// affine codes and 16-bit x.
//   quantized_gemv_matrix    out[m, n] = sum over k of x[m, k] W[n, k]
//   quantized_swiglu_matrix  out[m, n] = activation(g) * u,  with such products g and u
//
// Kernels: quantized_<gemv|swiglu>_matrix_<dtype>_g<group size>_n<rows of w>s<simdgroups>. A tile
// has that many rows of w (swiglu: half as many of each matrix). For the n32s4 kernel of gemv,
// tiles from params.whole_tiles on have 16 rows.
// Grid: (threadgroups, blocks of 8 rows of x, batch). There are as many threadgroups as tiles, or
// fewer if all tiles are full; each takes every groups.x-th tile. Threadgroup: 32 * simdgroups x 1
// x 1.
// Bindings: as for gemv.metal, and threadgroup memory 0 for two stages per simdgroup
// (MatrixStage::size).
// Function constants: 0: true; 4: x is staged.
// Alignment: 16 bytes. Arrays are dense, and K is a multiple of 256.
//
//   start copying the first step of this simdgroup
//   for each tile of this threadgroup:
//     totals = 0; for each step: accumulate            (pseudocode in gemv_matrix.h)
//     write totals to threadgroup memory; barrier
//     simdgroup f: add up fragment f over all simdgroups; store activation(gate) * up
#ifdef __MSLC__  // Apple's GPUs never launch these
#include "metal/common/kernel.h"
#include "metal/quantized_matmul/gemv_matrix_tiles.h"

// First and last row of w of this batch.
METAL_FUNC uint2 first_and_last_row(constant QuantizedParams& params, uint batch) {
  const uint first = batch * uint(params.outputs);
  return uint2(first, first + params.outputs - 1);
}

// The rows of x of this threadgroup, and where their results go.
template <typename T>
METAL_FUNC StagedRows<T> rows_of_group(const device T* x,
                                       constant QuantizedParams& params,
                                       uint3 group) {
  const int first_row = kMatrixRows * group.y;
  return {x + (long(group.z) * params.rows + first_row) * params.columns,
          uint(metal::min(params.rows - first_row, int(kMatrixRows)))};
}
template <typename T>
METAL_FUNC MatrixResults<T> results_of_group(device T* out,
                                             int first_output,
                                             constant QuantizedParams& params,
                                             uint3 group) {
  return {out + (long(group.z) * params.rows + kMatrixRows * group.y) * params.outputs,
          first_output, params.outputs};
}

template <typename T, int kGroup, int kFragments, int kSimdgroups>
[[kernel, max_total_threads_per_threadgroup(kMatrixThreadsOfRegisters)]] void quantized_gemv_matrix(
    const device T* x [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device T* scales [[buffer(2)]],
    const device T* biases [[buffer(3)]],
    device T* out [[buffer(4)]],
    constant QuantizedParams& params [[buffer(5)]],
    threadgroup uint4* memory [[threadgroup(0)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float2 shares[kSimdgroups][kFragments][32];
  const uint2 rows = first_and_last_row(params, group.z);
  const MatrixPlace place = {groups.x, simdgroup, lane};
  const StagedRows<T> own_rows = rows_of_group(x, params, group);
  StagedMatrices<T, 1> matrices = {
      {w}, {scales}, {biases}, uint(params.columns), uint(params.group_shift), rows.x, rows.y};
  enum { kHasHalves = kFragments == 4 && kSimdgroups == 4 };
  enum { kHalf = kHasHalves ? kFragments / 2 : int(kFragments) };
  const uint whole_tiles = params.whole_tiles, of_whole = 8 * kFragments * whole_tiles;
  if (kHasHalves && group.x >= whole_tiles) {
    matrices.first += of_whole;
    multiply_tiles<T, kGroup, kHalf, 1, kSimdgroups>(
        matrices, own_rows, results_of_group(out, of_whole, params, group), NothingAdded{}, params,
        place, group.x - whole_tiles, memory,
        reinterpret_cast<threadgroup float2(*)[kHalf][32]>(shares));
    return;
  }
  if (kHasHalves) {
    matrices.last = metal::min(rows.x + of_whole - 1, rows.y);
  }
  multiply_tiles<T, kGroup, kFragments, 1, kSimdgroups>(
      matrices, own_rows, results_of_group(out, 0, params, group), NothingAdded{}, params, place,
      group.x, memory, shares);
}

template <typename T, int kGroup, int kFragments, int kSimdgroups>
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
                        threadgroup uint4* memory [[threadgroup(0)]],
                        uint3 group [[threadgroup_position_in_grid]],
                        uint3 groups [[threadgroups_per_grid]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float2 shares[kSimdgroups][kFragments][32];
  const uint2 rows = first_and_last_row(params, group.z);
  multiply_tiles<T, kGroup, kFragments, 2, kSimdgroups>(
      {{gate_w, up_w},
       {gate_scales, up_scales},
       {gate_biases, up_biases},
       uint(params.columns),
       uint(params.group_shift),
       rows.x,
       rows.y},
      rows_of_group(x, params, group), results_of_group(out, 0, params, group), NothingAdded{},
      params, {groups.x, simdgroup, lane}, group.x, memory, shares);
}

#endif

// ---- kernels

#ifdef __MSLC__
#define INSTANTIATE_GEMV_MATRIX(name, dtype, type, group, rows, fragments, simdgroups) \
  MLX_ANVIL_KERNEL(#name "_" #dtype "_g" #group "_n" #rows "s" #simdgroups,            \
                   name<type, group, fragments, simdgroups>)

#define INSTANTIATE_GEMV_MATRIX_TILES(name, dtype, type, group) \
  INSTANTIATE_GEMV_MATRIX(name, dtype, type, group, 16, 2, 8)   \
  INSTANTIATE_GEMV_MATRIX(name, dtype, type, group, 32, 4, 4)   \
  INSTANTIATE_GEMV_MATRIX(name, dtype, type, group, 32, 4, 8)

#define INSTANTIATE_GEMV_MATRIX_GROUPS(name, dtype, type) \
  INSTANTIATE_GEMV_MATRIX_TILES(name, dtype, type, 32)    \
  INSTANTIATE_GEMV_MATRIX_TILES(name, dtype, type, 64)    \
  INSTANTIATE_GEMV_MATRIX_TILES(name, dtype, type, 128)

INSTANTIATE_GEMV_MATRIX_GROUPS(quantized_gemv_matrix, float16, half)
INSTANTIATE_GEMV_MATRIX_GROUPS(quantized_gemv_matrix, bfloat16, bfloat)
INSTANTIATE_GEMV_MATRIX_GROUPS(quantized_swiglu_matrix, float16, half)
INSTANTIATE_GEMV_MATRIX_GROUPS(quantized_swiglu_matrix, bfloat16, bfloat)
#endif

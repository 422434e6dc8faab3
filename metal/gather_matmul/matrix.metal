// Gathered quantized products on matrix units of 16-bit types: the tiles of gemv_matrix.metal (few
// rows per expert, 4-bit affine codes) and of gemm_matrix.metal (many).
//   gather_few_matrix, gather_gemm              out[p] = x[left(p)] w[expert(p)]^T
//   gather_few_matrix_gated, gather_gemm_gated  out[p] = activation(g) * u,  with such g and u
//
// Kernels: gather_few_matrix[_gated]_<dtype>_g<group size>_n<rows of w>s<simdgroups>, and
// gather_gemm[_gated]_<dtype>_<format>_r<rows>. A tile has that many rows of w, 64 for gemm (gated:
// half of them of each matrix), and up to 8 rows of x, or `rows` for gemm.
// Grid: (tiles of w, tiles of pairs), the latter folded into y and z. Threadgroup: 32 * simdgroups,
// 256 for gemm.
// Bindings: as in few.metal, and threadgroup memory 0 as in gemv_matrix.metal and
// gemm_matrix.metal. params is GatherGemmParams for gemm. Function constants and alignment: those
// of gemv_matrix.metal and gemm_matrix.metal, which need not know 2; and 6 to 10 as in few.metal.
//
//   tile = the expert and the rows of this threadgroup       (pair_tile.h)
//   sums = its products                                      (gemv_matrix_tiles.h, gemm_steps.h)
//   store them, or activation(gate) * up
#ifdef __MSLC__  // Apple's GPUs never launch these
#include "metal/common/kernel.h"
#include "metal/gather_matmul/gemm_pair_tile.h"
#include "metal/quantized_matmul/formats.h"
#include "metal/quantized_matmul/gemm_sums.h"
#include "metal/quantized_matmul/gemv_matrix_tiles.h"

// ---- few rows per expert

// The expert's rows of w.
METAL_FUNC uint2 rows_of_expert(uint expert, constant QuantizedParams& params) {
  const uint first = expert * uint(params.outputs);
  return uint2(first, first + params.outputs - 1);
}

template <typename T, int kGroup, int kFragments, int kSimdgroups>
[[kernel, max_total_threads_per_threadgroup(kMatrixThreadsOfRegisters)]] void gather_few_matrix(
    const device T* x [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device T* scales [[buffer(2)]],
    const device T* biases [[buffer(3)]],
    const device int* lhs [[buffer(4)]],
    const device int* rhs [[buffer(5)]],
    const device int2* table [[buffer(6)]],
    device T* out [[buffer(7)]],
    constant GatherParams& params [[buffer(8)]],
    threadgroup uint4* memory [[threadgroup(0)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float2 shares[kSimdgroups][kFragments][32];
  constant QuantizedParams& product = params.product;
  TileLoop tiles(group, groups);
  while (tiles.next(kMatrixRows, {lhs, rhs, table}, params)) {
    const PairTile tile = tiles.tile;
    const uint2 rows = rows_of_expert(tile.expert, product);
    multiply_tiles<T, kGroup, kFragments, 1, kSimdgroups>(
        {{w}, {scales}, {biases}, uint(product.columns), uint(product.group_shift), rows.x, rows.y},
        {x + ulong(tile.x_row) * product.columns, uint(tile.rows)},
        {out + ulong(tile.out_row) * product.outputs, 0, product.outputs}, NothingAdded{}, product,
        {groups.x, simdgroup, lane}, group.x, memory, shares);
  }
}

template <typename T, int kGroup, int kFragments, int kSimdgroups>
[[kernel, max_total_threads_per_threadgroup(kMatrixThreadsOfRegisters)]] void
gather_few_matrix_gated(const device T* x [[buffer(0)]],
                        const device uint* gate_w [[buffer(1)]],
                        const device T* gate_scales [[buffer(2)]],
                        const device T* gate_biases [[buffer(3)]],
                        const device uint* up_w [[buffer(4)]],
                        const device T* up_scales [[buffer(5)]],
                        const device T* up_biases [[buffer(6)]],
                        const device T* gate_added [[buffer(7)]],
                        const device T* up_added [[buffer(8)]],
                        const device int* lhs [[buffer(9)]],
                        const device int* rhs [[buffer(10)]],
                        const device int2* table [[buffer(11)]],
                        device T* out [[buffer(12)]],
                        constant GatherParams& params [[buffer(13)]],
                        threadgroup uint4* memory [[threadgroup(0)]],
                        uint3 group [[threadgroup_position_in_grid]],
                        uint3 groups [[threadgroups_per_grid]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float2 shares[kSimdgroups][kFragments][32];
  constant QuantizedParams& product = params.product;
  TileLoop tiles(group, groups);
  while (tiles.next(kMatrixRows, {lhs, rhs, table}, params)) {
    const PairTile tile = tiles.tile;
    const uint2 rows = rows_of_expert(tile.expert, product);
    const AddedVectors<T> added = {gate_added, up_added, ulong(rows.x)};
    multiply_tiles<T, kGroup, kFragments, 2, kSimdgroups>(
        {{gate_w, up_w},
         {gate_scales, up_scales},
         {gate_biases, up_biases},
         uint(product.columns),
         uint(product.group_shift),
         rows.x,
         rows.y},
        {x + ulong(tile.x_row) * product.columns, uint(tile.rows)},
        {out + ulong(tile.out_row) * product.outputs, 0, product.outputs}, added, product,
        {groups.x, simdgroup, lane}, group.x, memory, shares);
  }
}

// ---- many rows per expert

enum { kGemmFragments = 4, kGemmAcross = 2, kGemmAlong = 4 };

template <typename T, typename Format, int kRowFragments, int kMatrices>
using GatherGemm =
    GemmTile<T, Format, kRowFragments, kGemmFragments, kGemmAcross, kGemmAlong, kMatrices>;

// The sums of a tile of pairs, and their place in `out`.
template <int kStages, typename Tile, typename T, typename Added>
METAL_FUNC void gemm_of_tile(PairTile pairs,
                             GemmArrays<Tile> arrays,
                             device T* out,
                             Added added,
                             constant GatherGemmParams& params,
                             uint block,
                             threadgroup uint4* memory,
                             uint simdgroup,
                             uint lane) {
  const Tile tile = gemm_tile_of_pairs<Tile>(pairs, arrays, out, params, block, simdgroup, lane);
  typename Tile::Sums sums;
  add_steps<kStages>(tile, memory, 0, 0xffffffffu, params.gather.product.columns, sums);
  if (add_simdgroups<Tile>(sums, reinterpret_cast<threadgroup float2*>(memory), simdgroup, lane)) {
    PairResults<Tile, T, Added>{pairs, out, added, block}.store(tile, sums, params.gather.product);
  }
}

template <typename T, typename Format, int kRowFragments, int kStages>
[[kernel, max_total_threads_per_threadgroup(256)]] void gather_gemm(
    const device T* x [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device typename Format::template Scale<T>* scales [[buffer(2)]],
    const device T* biases [[buffer(3)]],
    const device int* lhs [[buffer(4)]],
    const device int* rhs [[buffer(5)]],
    const device int2* table [[buffer(6)]],
    device T* out [[buffer(7)]],
    constant GatherGemmParams& params [[buffer(8)]],
    threadgroup uint4* memory [[threadgroup(0)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Tile = GatherGemm<T, Format, kRowFragments, 1>;
  TileLoop tiles(group, groups);
  while (tiles.next(Tile::kRows, {lhs, rhs, table}, params.gather)) {
    gemm_of_tile<kStages, Tile>(tiles.tile, {x, {w}, {scales}, {biases}}, out, NothingAdded{},
                                params, group.x, memory, simdgroup, lane);
  }
}

template <typename T, typename Format, int kRowFragments, int kStages>
[[kernel, max_total_threads_per_threadgroup(256)]] void gather_gemm_gated(
    const device T* x [[buffer(0)]],
    const device uint* gate_w [[buffer(1)]],
    const device typename Format::template Scale<T>* gate_scales [[buffer(2)]],
    const device T* gate_biases [[buffer(3)]],
    const device uint* up_w [[buffer(4)]],
    const device typename Format::template Scale<T>* up_scales [[buffer(5)]],
    const device T* up_biases [[buffer(6)]],
    const device T* gate_added [[buffer(7)]],
    const device T* up_added [[buffer(8)]],
    const device int* lhs [[buffer(9)]],
    const device int* rhs [[buffer(10)]],
    const device int2* table [[buffer(11)]],
    device T* out [[buffer(12)]],
    constant GatherGemmParams& params [[buffer(13)]],
    threadgroup uint4* memory [[threadgroup(0)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Tile = GatherGemm<T, Format, kRowFragments, 2>;
  TileLoop tiles(group, groups);
  while (tiles.next(Tile::kRows, {lhs, rhs, table}, params.gather)) {
    const AddedVectors<T> added = {gate_added, up_added,
                                   ulong(tiles.tile.expert) * params.gather.product.outputs};
    gemm_of_tile<kStages, Tile>(
        tiles.tile, {x, {gate_w, up_w}, {gate_scales, up_scales}, {gate_biases, up_biases}}, out,
        added, params, group.x, memory, simdgroup, lane);
  }
}
#endif

// ---- kernels

#ifdef __MSLC__
#define INSTANTIATE_FEW_MATRIX(name, dtype, type, group, rows, fragments, simdgroups) \
  MLX_ANVIL_KERNEL(#name "_" #dtype "_g" #group "_n" #rows "s" #simdgroups,           \
                   name<type, group, fragments, simdgroups>)

#define INSTANTIATE_FEW_MATRIX_TILES(name, dtype, type, group) \
  INSTANTIATE_FEW_MATRIX(name, dtype, type, group, 16, 2, 8)   \
  INSTANTIATE_FEW_MATRIX(name, dtype, type, group, 32, 4, 4)

#define INSTANTIATE_FEW_MATRIX_GROUPS(name, dtype, type) \
  INSTANTIATE_FEW_MATRIX_TILES(name, dtype, type, 32)    \
  INSTANTIATE_FEW_MATRIX_TILES(name, dtype, type, 64)    \
  INSTANTIATE_FEW_MATRIX_TILES(name, dtype, type, 128)

INSTANTIATE_FEW_MATRIX_GROUPS(gather_few_matrix, float16, half)
INSTANTIATE_FEW_MATRIX_GROUPS(gather_few_matrix, bfloat16, bfloat)
INSTANTIATE_FEW_MATRIX_GROUPS(gather_few_matrix_gated, float16, half)
INSTANTIATE_FEW_MATRIX_GROUPS(gather_few_matrix_gated, bfloat16, bfloat)

#define INSTANTIATE_GEMM(name, format, kernel_name, dtype, type, rows, stages) \
  MLX_ANVIL_KERNEL(#kernel_name "_" #dtype "_" #name "_r" #rows,               \
                   kernel_name<type, format, rows / 8, stages>)

#define INSTANTIATE_GEMM_TILES(name, format, kernel_name, dtype, type) \
  INSTANTIATE_GEMM(name, format, kernel_name, dtype, type, 16, 3)      \
  INSTANTIATE_GEMM(name, format, kernel_name, dtype, type, 32, 3)

MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_GEMM_TILES, gather_gemm, float16, half)
MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_GEMM_TILES, gather_gemm, bfloat16, bfloat)
MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_GEMM_TILES, gather_gemm_gated, float16, half)
MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_GEMM_TILES, gather_gemm_gated, bfloat16, bfloat)
#endif

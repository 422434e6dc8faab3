// Gathered quantized products with many rows per expert, by products of four SIMD groups: the tiles
// of metal/quantized_matmul/gemm_group.metal.
//   gather_gemm_group        out[p] = x[left(p)] w[expert(p)]^T
//   gather_gemm_group_gated  out[p] = activation(g) * u,  with such g and u
//
// Kernels: gather_gemm_group[_gated]_<dtype>_<format>_r<rows>. A tile has up to that many rows of
// x, and 128 of w (gated: half of them of each matrix).
// Grid, bindings, function constants and alignment: as for gather_gemm (matrix.metal).
// Threadgroup: 256 x 1 x 1. Threadgroup memory 0: kStages stages.
//
//   tile = the expert and the rows of this threadgroup       (pair_tile.h)
//   sums = its products                                      (gemm_group.h)
//   store them, or activation(gate) * up                     (gemm_pair_tile.h)
#ifdef __MSLC__  // Apple's GPUs never launch these
#include "metal/common/kernel.h"
#include "metal/gather_matmul/gemm_pair_tile.h"
#include "metal/quantized_matmul/formats.h"
#include "metal/quantized_matmul/gemm_group.h"

enum { kGemmGroups = 2 };  // of four SIMD groups

// Stores activation(gate) * up by a loop that is not unrolled, for which sums pass through
// threadgroup memory: many rows times all activations would be thousands of instructions.
template <typename Tile, typename Results>
METAL_FUNC void store_through_memory(const thread Tile& tile,
                                     const thread typename Tile::Sums& sums,
                                     const thread Results& results,
                                     constant QuantizedParams& product,
                                     threadgroup float2* memory,
                                     uint simdgroup,
                                     uint lane) {
  enum { kColumns = Results::kColumns };
  threadgroup float2* const own = memory + 2 * kColumns * 32 * simdgroup + lane;
  MLX_ANVIL_UNROLL
  for (int m = 0; m < int(kColumns); ++m) {
    own[64 * m] = elements_of(sums.fragments[0][m]);
    own[64 * m + 32] = elements_of(sums.fragments[1][m]);
  }
  MLX_ANVIL_NO_UNROLL
  for (int m = 0; m < int(kColumns); ++m) {
    results.store(tile, 0, m, own[64 * m], own[64 * m + 32], product);
  }
}

// The tiles of a threadgroup, and their place in `out`.
template <int kStages, typename Tile, typename T, typename Added>
METAL_FUNC void group_gemm_of_tiles(TileLoop tiles,
                                    PairArrays pairs,
                                    GemmArrays<Tile> arrays,
                                    device T* out,
                                    Added added,
                                    constant GatherGemmParams& params,
                                    uint block,
                                    threadgroup uint4* memory,
                                    uint simdgroup,
                                    uint lane) {
  constant GatherParams& gather = params.gather;
  while (tiles.next(Tile::kRows, pairs, gather)) {
    Tile tile = gemm_tile_of_pairs<Tile>(tiles.tile, arrays, out, params, block, simdgroup, lane);
    tile.start(tile.place.column / 2);
    typename Tile::Sums sums;
    add_group_steps<kStages>(tile, memory, 0, 0xffffffffu, gather.product.columns, sums);
    const PairTile own = tiles.read_again(Tile::kRows, pairs, gather);
    const PairResults<Tile, T, Added> results = {
        own, out, added.of_expert(own.expert, gather.product), block};
    if (int(Tile::kMatrixCount) == 1) {
      results.store(tile, sums, gather.product);
    } else {
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // all have read the last stage
      static_assert(16 * kStages * Tile::kStage >= 4 * Tile::kOutputs * Tile::kRows, "sums fit");
      store_through_memory(tile, sums, results, gather.product,
                           reinterpret_cast<threadgroup float2*>(memory), simdgroup, lane);
    }
  }
}

template <typename T, typename Format, int kXRows, int kStages>
[[kernel, max_total_threads_per_threadgroup(128 * kGemmGroups)]] void gather_gemm_group(
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
  using Tile = GroupGemmTile<T, Format, kXRows, kGemmGroups>;
  group_gemm_of_tiles<kStages, Tile>(TileLoop(group, groups), {lhs, rhs, table},
                                     {x, {w}, {scales}, {biases}}, out, NothingAdded{}, params,
                                     group.x, memory, simdgroup, lane);
}

template <typename T, typename Format, int kXRows, int kStages>
[[kernel, max_total_threads_per_threadgroup(128 * kGemmGroups)]] void gather_gemm_group_gated(
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
  using Tile = GroupGemmTile<T, Format, kXRows, kGemmGroups, 2>;
  group_gemm_of_tiles<kStages, Tile>(
      TileLoop(group, groups), {lhs, rhs, table},
      {x, {gate_w, up_w}, {gate_scales, up_scales}, {gate_biases, up_biases}}, out,
      AddedVectors<T>{gate_added, up_added, 0}, params, group.x, memory, simdgroup, lane);
}
#endif

// ---- kernels

#ifdef __MSLC__
#define INSTANTIATE_GROUP(name, format, kernel_name, dtype, type, rows, stages) \
  MLX_ANVIL_KERNEL(#kernel_name "_" #dtype "_" #name "_r" #rows,                \
                   kernel_name<type, format, rows, stages>)

#define INSTANTIATE_GROUP_TILES(name, format, kernel_name, dtype, type) \
  INSTANTIATE_GROUP(name, format, kernel_name, dtype, type, 64, 4)      \
  INSTANTIATE_GROUP(name, format, kernel_name, dtype, type, 128, 4)

// Threadgroup memory has room for tiles of 256 rows of x beside those of up to four bits; to unpack
// three bits takes more registers.
#define INSTANTIATE_GROUP_DTYPE(kernel_name, dtype, type)                        \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_GROUP_TILES, kernel_name, dtype, type) \
  INSTANTIATE_GROUP(affine2, AffineFormat<2>, kernel_name, dtype, type, 256, 3)  \
  INSTANTIATE_GROUP(affine4, AffineFormat<4>, kernel_name, dtype, type, 256, 3)  \
  INSTANTIATE_GROUP(mxfp4, Mxfp4Format, kernel_name, dtype, type, 256, 3)        \
  INSTANTIATE_GROUP(nvfp4, Nvfp4Format, kernel_name, dtype, type, 256, 3)

INSTANTIATE_GROUP_DTYPE(gather_gemm_group, float16, half)
INSTANTIATE_GROUP_DTYPE(gather_gemm_group, bfloat16, bfloat)
INSTANTIATE_GROUP_DTYPE(gather_gemm_group_gated, float16, half)
INSTANTIATE_GROUP_DTYPE(gather_gemm_group_gated, bfloat16, bfloat)
#endif

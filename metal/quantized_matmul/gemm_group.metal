// The same computation as gemm_matrix.metal, for GPUs whose matrix units multiply for four SIMD
// groups at once (metal/common/group_product.h).
//
// Kernels: quantized_gemm_group_<dtype>_<format>_r<rows>: tiles of that many rows of x, and 128 of
// w.
// Grid, bindings, function constants and alignment: as for gemm_matrix.metal.
// Threadgroup: 256 x 1 x 1. Threadgroup memory 0: kStages stages.
//
//   start copying the first stages
//   for each step of 128 columns of this part:
//     for each 32 columns:
//       unpack weights; start sums += W x^T; wait for the product before
//       after the first: wait for the next step; barrier; start copying a later one
//   store the sums, or this part of them
#ifdef __MSLC__  // Apple's GPUs launch tiles.metal instead
#include "metal/common/kernel.h"
#include "metal/quantized_matmul/formats.h"
#include "metal/quantized_matmul/gemm_group.h"
#include "metal/quantized_matmul/gemm_steps.h"
#include "metal/quantized_matmul/gemm_sums.h"
#include "metal/quantized_matmul/params.h"

template <typename T, typename Format, int kXRows, int kGroups, int kStages>
[[kernel, max_total_threads_per_threadgroup(128 * kGroups)]] void quantized_gemm_group(
    const device T* x [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device typename Format::template Scale<T>* scales [[buffer(2)]],
    const device T* biases [[buffer(3)]],
    device uchar* out [[buffer(4)]],
    constant QuantizedGemmParams& params [[buffer(5)]],
    threadgroup uint4* memory [[threadgroup(0)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Tile = GroupGemmTile<T, Format, kXRows, kGroups>;
  const uint part = group.z % params.parts, batch = group.z / params.parts;
  const uint first_output = group.x * Tile::kOutputs, first_row = group.y * Tile::kRows;
  Tile tile =
      gemm_tile<Tile>({x, {w}, {scales}, {biases}}, long(batch) * params.outputs + first_output,
                      params.outputs - first_output, long(batch) * params.rows + first_row,
                      params.rows - first_row, params, simdgroup, lane, out);
  tile.start(tile.place.column / 2);
  const uint begin = part * params.steps_per_part;
  typename Tile::Sums sums;
  add_group_steps<kStages>(tile, memory, begin, begin + params.steps_per_part, params.columns,
                           sums);
  store_outputs(tile, sums, params, first_row, first_output, batch, part, groups.z / params.parts,
                out);
}
#endif

// ---- kernels

#ifdef __MSLC__
#define INSTANTIATE_GEMM_GROUP(name, format, dtype, type, rows, ...)    \
  MLX_ANVIL_KERNEL("quantized_gemm_group_" #dtype "_" #name "_r" #rows, \
                   quantized_gemm_group<type, format, rows, __VA_ARGS__>)

// Groups of four SIMD groups, and stages.
#define INSTANTIATE_GEMM_GROUP_TILES(name, format, dtype, type) \
  INSTANTIATE_GEMM_GROUP(name, format, dtype, type, 64, 2, 4)   \
  INSTANTIATE_GEMM_GROUP(name, format, dtype, type, 128, 2, 4)  \
  INSTANTIATE_GEMM_GROUP(name, format, dtype, type, 192, 2, 3)

// Threadgroup memory has room for tiles of 256 rows of x beside those of up to four bits.
#define INSTANTIATE_GEMM_GROUP_DTYPE(dtype, type)                          \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_GEMM_GROUP_TILES, dtype, type)   \
  INSTANTIATE_GEMM_GROUP(affine2, AffineFormat<2>, dtype, type, 256, 2, 3) \
  INSTANTIATE_GEMM_GROUP(affine3, AffineFormat<3>, dtype, type, 256, 2, 3) \
  INSTANTIATE_GEMM_GROUP(affine4, AffineFormat<4>, dtype, type, 256, 2, 3) \
  INSTANTIATE_GEMM_GROUP(mxfp4, Mxfp4Format, dtype, type, 256, 2, 3)       \
  INSTANTIATE_GEMM_GROUP(nvfp4, Nvfp4Format, dtype, type, 256, 2, 3)

INSTANTIATE_GEMM_GROUP_DTYPE(float16, half)
INSTANTIATE_GEMM_GROUP_DTYPE(bfloat16, bfloat)
#endif

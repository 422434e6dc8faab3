// Quantized GEMM for 9 and more rows of x on matrix units, 16-bit x:
//   out[m, n] = sum over k of x[m, k] W[n, k],  with W rounded to the type of x
//
// Kernels: quantized_gemm_<dtype>_<format>_r<rows>n<outputs>: tiles of that many rows of x and w.
// Grid: (tiles of w, tiles of x, batch * parts). Threadgroup: 256 x 1 x 1.
// Bindings: x, w, scales, biases (x in place of absent ones), out, params; threadgroup memory 0 for
// kStages stages (GemmTile::kStage).
// Function constants: 2: see parts.h; 5: K is a multiple of GemmTile::kColumns.
// Constant 5 also leaves room for two threadgroups of 16 rows per multiprocessor.
// Alignment: 16 bytes for x and w, factor_bytes for scales and biases. Arrays are dense, and rows
// of x and w are whole vectors of 16 bytes.
//
//   start copying the first stages
//   for each step of kColumns columns of this part:
//     wait for this step; barrier; start copying the step after the next ones
//     each simdgroup: for each piece of its 128 columns: unpack codes; sums += W x^T
//   add up the simdgroups that split the columns, in order       (threadgroup memory)
//   store the sums, or this part of them
#ifdef __MSLC__  // Apple's GPUs launch tiles.metal instead
#include "metal/common/kernel.h"
#include "metal/common/resident.h"
#include "metal/quantized_matmul/formats.h"
#include "metal/quantized_matmul/gemm_steps.h"
#include "metal/quantized_matmul/gemm_sums.h"
#include "metal/quantized_matmul/params.h"

template <typename T,
          typename Format,
          int kRowFragments,
          int kFragments,
          int kAcross,
          int kAlong,
          int kStages>
[[kernel, max_total_threads_per_threadgroup(32 * kAcross * kAlong)]] void quantized_gemm(
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
  using Tile = GemmTile<T, Format, kRowFragments, kFragments, kAcross, kAlong>;
  if (kRowFragments == 2 && kAcross == 2 && Format::kBits < 8) {
    keep_resident<2, 5>(steps_are_whole);
  }
  const uint part = group.z % params.parts, batch = group.z / params.parts;
  const uint first_output = group.x * Tile::kOutputs, first_row = group.y * Tile::kRows;
  const Tile tile =
      gemm_tile<Tile>({x, {w}, {scales}, {biases}}, long(batch) * params.outputs + first_output,
                      params.outputs - first_output, long(batch) * params.rows + first_row,
                      params.rows - first_row, params, simdgroup, lane, out);
  const uint begin = part * params.steps_per_part;
  typename Tile::Sums sums;
  add_steps<kStages>(tile, memory, begin, begin + params.steps_per_part, params.columns, sums);
  if (!add_simdgroups<Tile>(sums, reinterpret_cast<threadgroup float2*>(memory), simdgroup, lane)) {
    return;
  }

  store_outputs(tile, sums, params, first_row, first_output, batch, part, groups.z / params.parts,
                out);
}
#endif

// ---- kernels

#ifdef __MSLC__
#define INSTANTIATE_GEMM(name, format, dtype, type, rows, outputs, ...)        \
  MLX_ANVIL_KERNEL("quantized_gemm_" #dtype "_" #name "_r" #rows "n" #outputs, \
                   quantized_gemm<type, format, rows / 8, 4, outputs / 32, __VA_ARGS__>)

// Simdgroups along the columns, and stages.
#define INSTANTIATE_GEMM_TILES(name, format, dtype, type)   \
  INSTANTIATE_GEMM(name, format, dtype, type, 16, 32, 8, 3) \
  INSTANTIATE_GEMM(name, format, dtype, type, 16, 64, 4, 3) \
  INSTANTIATE_GEMM(name, format, dtype, type, 32, 64, 4, 3) \
  INSTANTIATE_GEMM(name, format, dtype, type, 64, 64, 4, 2)

MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_GEMM_TILES, float16, half)
MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_GEMM_TILES, bfloat16, bfloat)
#endif

// Quantized GEMM for 9 and more rows of x on matrix units, 16-bit x:
//   out[m, k] = sum over n of x[m, n] W[n, k],  with W rounded to the type of x
//
// Kernels: quantized_gemmplain_<dtype>_<format>_r<rows>: tiles of that many rows of x.
// Grid: (tiles of 128 columns of w, tiles of x, batch * parts). Threadgroup: 256 x 1 x 1.
// Bindings: x, w, scales, biases (x in place of absent ones), out, params; threadgroup memory 0 for
// two or three stages (GemmPlainTile::kStage).
// Function constants: 2: see parts.h; 5: N is a multiple of GemmPlainTile::kDepth.
// Alignment: 16 bytes for x, w and out, 4 for scales and biases. Arrays are dense, K is a multiple
// of 128, and N of eight.
//
//   start copying the first stages
//   for each step of kDepth rows of w of this part:
//     wait for this step; barrier; start copying the step after the next ones
//     each simdgroup: for each 32 of its 128 rows: unpack codes; transpose; sums += W^T x^T
//   add up the simdgroups that split the rows, in order       (threadgroup memory)
//   store the sums, or this part of them
#ifdef __MSLC__  // Apple's GPUs launch tiles.metal instead
#include "metal/common/kernel.h"
#include "metal/quantized_matmul/formats.h"
#include "metal/quantized_matmul/gemm_plain.h"
#include "metal/quantized_matmul/gemm_sums.h"
#include "metal/quantized_matmul/params.h"
#include "metal/quantized_matmul/parts.h"

template <typename T, typename Format, int kRowFragments, int kAlong, int kStages>
[[kernel, max_total_threads_per_threadgroup(128 * kAlong)]] void quantized_gemmplain(
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
  using Tile = GemmPlainTile<T, Format, kRowFragments, kAlong>;
  const uint part = group.z % params.parts, batch = group.z / params.parts;
  const uint first_row = group.y * Tile::kRows;
  const long w_rows = long(batch) * params.outputs;
  Tile tile;
  tile.row_words = uint(params.columns) / 128 * Tile::kBits;
  tile.row_x = params.outputs / 8;
  tile.row_groups = params.columns >> params.group_shift;
  tile.words =
      reinterpret_cast<const device uint4*>(w) + (w_rows * tile.row_words + group.x * Tile::kWords);
  tile.x = reinterpret_cast<const device uint4*>(x) +
           (long(batch) * params.rows + first_row) * tile.row_x;
  tile.scales = scales + w_rows * tile.row_groups;
  tile.biases = biases + w_rows * tile.row_groups;
  tile.last_row = metal::min(uint(Tile::kRows), params.rows - first_row) - 1;
  tile.column = group.x * Tile::kColumns;
  tile.depth = params.outputs;
  tile.group_shift = params.group_shift;
  tile.across = simdgroup % Tile::kAcross;
  tile.along = simdgroup / Tile::kAcross;
  tile.place = fragment_place(lane);
  tile.copier = 32 * simdgroup + 4 * tile.place.row + tile.place.column / 2;
  // Added zeros keep it in a register: the compiler cannot fold the top bit of an address.
  tile.magic = uint(GemmMagic<T>::kBits) + uint(reinterpret_cast<ulong>(out + lane) >> 63);

  const uint steps = (params.outputs + Tile::kDepth - 1) / Tile::kDepth;
  const uint begin = part * params.steps_per_part;
  const uint end = metal::min(steps, begin + params.steps_per_part);
  MLX_ANVIL_UNROLL
  for (int s = 0; s < kStages - 1; ++s) {
    if (begin + s < end) {
      tile.start_copies(memory + s * Tile::kStage, begin + s);
    }
    end_copies();
  }
  typename Tile::Sums sums;
  sums.zero();
  uint place_of_step = 0;
  MLX_ANVIL_NO_UNROLL
  for (uint step = begin; step < end; ++step) {
    wait_for_copies<kStages - 2>();
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (step + kStages - 1 < end) {
      const uint free = place_of_step == 0 ? kStages - 1 : place_of_step - 1;
      tile.start_copies(memory + free * Tile::kStage, step + kStages - 1);
    }
    end_copies();
    tile.add_products(memory + place_of_step * Tile::kStage, params.outputs - step * Tile::kDepth,
                      sums);
    place_of_step = place_of_step == kStages - 1 ? 0 : place_of_step + 1;
  }
  if (!add_simdgroups<Tile>(sums, reinterpret_cast<threadgroup float2*>(memory), simdgroup, lane)) {
    return;
  }

  const long batches = groups.z / params.parts;
  MLX_ANVIL_UNROLL
  for (int m = 0; m < kRowFragments; ++m) {
    // Fragment q has columns 2 q and 2 q + 1 of every eight.
    const int column = tile.column + 32 * tile.across;
    if (outputs_are_in_parts) {
      const int row = first_row + 8 * m + tile.place.column;
      device float* const to = reinterpret_cast<device float*>(out) +
                               ((part * batches + batch) * params.rows + row) * params.columns +
                               column + tile.place.row / 2 * 8 + tile.place.row % 2;
      MLX_ANVIL_UNROLL
      for (int q = 0; q < 4; ++q) {
        const float2 pair = elements_of(sums.fragments[q][m]);
        if (row < params.rows) {
          to[2 * q] = pair.x;
        }
        if (row + 1 < params.rows) {
          to[params.columns + 2 * q] = pair.y;
        }
      }
    } else {
      const int row = first_row + 8 * m + tile.place.row;
      uint4 eight;
      MLX_ANVIL_UNROLL
      for (int q = 0; q < 4; ++q) {
        const Fragment<T> own = fragment_of<T>(elements_of(sums.fragments[q][m]));
        eight[q] = as_type<uint>(elements_of(transposed(own, tile.place)));
      }
      if (row < params.rows) {
        device T* const to = reinterpret_cast<device T*>(out) +
                             (long(batch) * params.rows + row) * params.columns + column;
        *reinterpret_cast<device uint4*>(to + 4 * tile.place.column) = eight;
      }
    }
  }
}
#endif

// ---- kernels

#ifdef __MSLC__
#define INSTANTIATE_GEMM_PLAIN(name, format, dtype, type, rows, ...)   \
  MLX_ANVIL_KERNEL("quantized_gemmplain_" #dtype "_" #name "_r" #rows, \
                   quantized_gemmplain<type, format, rows / 8, __VA_ARGS__>)

// Simdgroups along the rows of w, and stages.
#define INSTANTIATE_GEMM_PLAIN_TILES(name, format, dtype, type) \
  INSTANTIATE_GEMM_PLAIN(name, format, dtype, type, 16, 2, 3)   \
  INSTANTIATE_GEMM_PLAIN(name, format, dtype, type, 32, 2, 3)   \
  INSTANTIATE_GEMM_PLAIN(name, format, dtype, type, 64, 2, 3)

MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_GEMM_PLAIN_TILES, float16, half)
MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_GEMM_PLAIN_TILES, bfloat16, bfloat)
#endif

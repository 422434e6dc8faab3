// The loop of gemm_matrix.metal: sums of a tile, step after step.
#pragma once

#include "metal/quantized_matmul/gemm_matrix.h"
#include "metal/quantized_matmul/params.h"

// Arrays of one product. With two matrices, all have the same shape.
template <typename Tile>
struct GemmArrays {
  const device typename Tile::Element* x;
  const device uint* w[Tile::kMatrixCount];
  const device typename Tile::Scale* scales[Tile::kMatrixCount];
  const device typename Tile::Element* biases[Tile::kMatrixCount];
};

// Returns the tile that starts at row w_row of each matrix, which has `outputs` rows from there,
// and at row x_row of x, which has `rows` from there. `any` is an address.
template <typename Tile>
METAL_FUNC Tile gemm_tile(GemmArrays<Tile> arrays,
                          long w_row,
                          uint outputs,
                          long x_row,
                          uint rows,
                          constant QuantizedGemmParams& params,
                          uint simdgroup,
                          uint lane,
                          const device uchar* any) {
  Tile tile;
  tile.row_words = uint(params.columns) / 32 * Tile::kBits / 4;
  tile.row_x = params.columns / 8;
  tile.row_groups = params.columns >> params.group_shift;
  MLX_ANVIL_UNROLL
  for (int m = 0; m < Tile::kMatrixCount; ++m) {
    tile.words[m] = reinterpret_cast<const device uint4*>(arrays.w[m]) + w_row * tile.row_words;
    tile.scales[m] = arrays.scales[m] + w_row * tile.row_groups;
    tile.biases[m] = arrays.biases[m] + w_row * tile.row_groups;
  }
  tile.x = reinterpret_cast<const device uint4*>(arrays.x) + x_row * tile.row_x;
  tile.last_output = metal::min(uint(Tile::kOutputs) / Tile::kMatrixCount, outputs) - 1;
  tile.last_row = metal::min(uint(Tile::kRows), rows) - 1;
  tile.group_shift = params.group_shift;
  tile.factor_bytes = params.factor_bytes;
  tile.across = simdgroup % Tile::kFirst;
  tile.along = simdgroup / Tile::kFirst;
  tile.place = fragment_place(lane);
  tile.copier = 32 * simdgroup + 4 * tile.place.row + tile.place.column / 2;
  // Added zeros keep it in a register: the compiler cannot fold the top bit of an address.
  tile.magic = uint(GemmMagic<typename Tile::Element>::kBits) +
               uint(reinterpret_cast<ulong>(any + lane) >> 63);
  return tile;
}

// Sums of the steps from `begin` on, up to `end` or the last of all columns.
template <int kStages, typename Tile>
METAL_FUNC void add_steps(const thread Tile& tile,
                          threadgroup uint4* memory,
                          uint begin,
                          uint end,
                          uint columns,
                          thread typename Tile::Sums& sums) {
  end = metal::min((columns + Tile::kColumns - 1) / Tile::kColumns, end);
  MLX_ANVIL_UNROLL
  for (int s = 0; s < kStages - 1; ++s) {
    if (begin + s < end) {
      tile.start_copies(memory + s * Tile::kStage, begin + s);
    }
    end_copies();
  }
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
    tile.add_products(memory + place_of_step * Tile::kStage, columns - step * Tile::kColumns, sums);
    place_of_step = place_of_step == kStages - 1 ? 0 : place_of_step + 1;
  }
}

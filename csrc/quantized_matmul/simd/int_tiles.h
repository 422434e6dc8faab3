// The inner loop of the integer GEMMs with panels of rows of w (int_gemm.cpp, and that of
// gguf_matmul). For kernel files only, and only on machines with VNNI.
#pragma once

#include "quantized_matmul/simd/amx_tiles.h"
#include "quantized_matmul/simd/int_panels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// A chunk of columns of a panel and of a tile of rows of x. Without kShifts, factors of the sum of
// x are 0 and are not read.
template <class Tiles, bool kShifts = true>
struct IntTile {
  const char* x;
  const StepFactors<Tiles>* factors;
  const uint8_t* codes;
  const float* scales;
  float* totals;                // [rows][kPanelRows]
  int64_t groups, steps, runs;  // groups; steps per group; runs per step
};

// Adds the products of a group to the total of a row of x and a vector of rows of w.
template <bool kShifts>
MLX_ANVIL_UNROLLED void add_group(
    f32v products, f32v scale, f32v shift, float sum_of_x, f32v& total) {
  const f32v with_shift = kShifts ? total + shift * sum_of_x : total;
  // Keep this order: a small scale times the step could be subnormal.
  total = products * scale + with_shift;
}

template <int kRows, int kPieces, bool kShifts>
[[gnu::noinline]] void add_products_of_rows(const IntTile<VnniTiles<kPieces>, kShifts>& tile) {
  const StepFactors<VnniTiles<kPieces>>* factors = tile.factors;
  const char* x = tile.x;
  const uint8_t* w = tile.codes;
  const float* scales = tile.scales;
  const int64_t runs = tile.runs;
  for (int64_t group = 0; group < tile.groups; ++group, scales += 2 * kPanelRows) {
    f32v products[kRows][kPanelVectors] = {};
    // Of several bytes, a group has one step.
    for (int64_t step = 0; step < (kPieces == 1 ? tile.steps : 1); ++step, ++factors) {
      TileSums<kPieces, kRows, kPanelVectors> sums;
      start_sums<kPieces, kRows, kPanelVectors>(factors->start, sums);
      add_runs<kPieces, kRows, kPanelVectors>(x, w, runs, sums);
      for (int m = 0; m < kRows; ++m) {
        for (int v = 0; v < kPanelVectors; ++v) {
          products[m][v] += in_floats(sums[m], v) * factors->step[m];
        }
      }
    }
    for (int m = 0; m < kRows; ++m) {
      for (int v = 0; v < kPanelVectors; ++v) {
        float* const to = tile.totals + m * kPanelRows + v * kLanes;
        f32v total = load_lanes(to);
        add_group<kShifts>(products[m][v], load_lanes(scales + v * kLanes),
                           load_lanes(scales + kPanelRows + v * kLanes), factors[-1].sum[m], total);
        store_lanes(to, total);
      }
    }
  }
}

// Multiplies the next rows, given that `left` rows of x are left.
template <int kPieces, bool kShifts>
void add_products(const IntTile<VnniTiles<kPieces>, kShifts>& tile, int64_t left) {
  VnniTiles<kPieces>::with_rows(left, [&](auto these) { add_products_of_rows<these.value>(tile); });
}

// A vector of rows of w at a time, so that registers hold the totals of all rows of x. The tiles
// multiply a group while vectors add the previous one to the totals.
template <int kSteps, int kPieces, bool kShifts>
[[gnu::noinline]] void add_products_by_amx(const IntTile<AmxTiles<kPieces>, kShifts>& tile) {
  using Tiles = AmxTiles<kPieces>;
  const int64_t columns = tile.runs * kRun, block = Tiles::block_of(columns);
  const int64_t blocks = columns / block;
  for (int v = 0; v < kPanelVectors; ++v) {
    const StepFactors<Tiles>* factors = tile.factors;
    const char* x = tile.x;
    const uint8_t* w = tile.codes + v * 64;
    const float* scales = tile.scales + v * kLanes;
    float* const to = tile.totals + v * kLanes;
    const auto multiply_group = [&]() __attribute__((always_inline)) {
      unroll<kSteps>([&](auto step) __attribute__((always_inline)) {
        Tiles::template multiply<step.value * kPieces, kPanelVectors>(x, w, blocks, block);
        x += columns * Tiles::kRows * kPieces;
        w += columns * kPanelRows;
      });
    };
    f32v totals[Tiles::kRows];
    unroll<Tiles::kRows>([&](auto m) { totals[m.value] = load_lanes(to + m.value * kPanelRows); });
    multiply_group();
    for (int64_t group = 0; group < tile.groups; ++group) {
      typename Tiles::Sums sums[kSteps];
      unroll<kSteps>([&](auto step) __attribute__((always_inline)) {
        Tiles::template store<step.value * kPieces>(sums[step.value]);
      });
      if (group + 1 < tile.groups) {
        multiply_group();
      }
      const f32v scale = load_lanes(scales), shift = load_lanes(scales + kPanelRows);
      unroll<Tiles::kRows>([&](auto m) __attribute__((always_inline)) {
        f32v products{};
        unroll<kSteps>([&](auto step) __attribute__((always_inline)) {
          products +=
              Tiles::in_floats(sums[step.value], m.value) * factors[step.value].step[m.value];
        });
        add_group<kShifts>(products, scale, shift, factors[kSteps - 1].sum[m.value],
                           totals[m.value]);
      });
      factors += kSteps;
      scales += 2 * kPanelRows;
    }
    unroll<Tiles::kRows>([&](auto m) { store_lanes(to + m.value * kPanelRows, totals[m.value]); });
  }
}

// All rows of a tile are multiplied. Those past the last have factors of 0.
template <int kPieces, bool kShifts>
void add_products(const IntTile<AmxTiles<kPieces>, kShifts>& tile, int64_t) {
  if constexpr (kPieces == 1) {
    tile.steps == 4   ? add_products_by_amx<4>(tile)
    : tile.steps == 2 ? add_products_by_amx<2>(tile)
                      : add_products_by_amx<1>(tile);
  } else {
    add_products_by_amx<1>(tile);
  }
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

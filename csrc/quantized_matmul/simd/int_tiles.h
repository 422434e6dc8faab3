// The inner loop of the integer GEMMs with panels of rows of w (int_gemm.cpp, and that of
// gguf_matmul). For kernel files only, and only on machines with VNNI.
#pragma once

#include "quantized_matmul/simd/int_panels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// A chunk of columns of a panel and of a tile of rows of x.
template <int kPieces>
struct IntTile {
  const char* x;
  const StepFactors<kPieces>* factors;
  const uint8_t* codes;
  const float* scales;
  float* totals;  // [rows][kPanelRows]
};

// Adds the products of kRows rows of x and a panel of w, over `groups` groups of `steps` steps of
// `runs` runs each.
template <int kPieces, int kRows>
__attribute__((noinline)) void add_products(const IntTile<kPieces>& tile,
                                            int64_t groups,
                                            int64_t steps,
                                            int64_t runs) {
  const StepFactors<kPieces>* factors = tile.factors;
  const char* x = tile.x;
  const uint8_t* w = tile.codes;
  const float* scales = tile.scales;
  for (int64_t group = 0; group < groups; ++group) {
    f32v products[kRows][kPanelVectors] = {};
    float sums_of_x[kRows] = {};
    // Of several bytes, a group has one step.
    for (int64_t step = 0; step < (kPieces == 1 ? steps : 1); ++step, ++factors) {
      TileSums<kPieces, kRows, kPanelVectors> sums;
      start_sums<kPieces, kRows, kPanelVectors>(factors->start, sums);
      add_runs<kPieces, kRows, kPanelVectors>(x, w, runs, sums);
      for (int m = 0; m < kRows; ++m) {
        for (int v = 0; v < kPanelVectors; ++v) {
          products[m][v] += in_floats(sums[m], v) * factors->step[m];
        }
        sums_of_x[m] += factors->sum[m];
      }
    }
    for (int m = 0; m < kRows; ++m) {
      for (int v = 0; v < kPanelVectors; ++v) {
        const f32v scale = load_lanes(scales + v * kLanes);
        const f32v shift = load_lanes(scales + kPanelRows + v * kLanes);
        float* const total = tile.totals + m * kPanelRows + v * kLanes;
        const f32v with_shift = load_lanes(total) + shift * sums_of_x[m];
        // Keep this order: a small scale times the step could be subnormal.
        store_lanes(total, products[m][v] * scale + with_shift);
      }
    }
    scales += 2 * kPanelRows;
  }
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

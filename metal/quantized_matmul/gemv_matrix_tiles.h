// The tiles of gemv_matrix.metal: rows of w times up to 8 rows of x, and where their results go.
#pragma once

#include "metal/quantized_matmul/gated_product.h"
#include "metal/quantized_matmul/gemv_matrix.h"

// Position of a lane.
struct MatrixPlace {
  uint groups;  // threadgroups that share the tiles of a matrix
  uint simdgroup;
  uint lane;
};

// Where the results of up to 8 rows of x go.
template <typename T>
struct MatrixResults {
  device T* out;
  int first_output;  // of the tiles
  int outputs;       // per row

  // Stores element n of rows m and m + 1, of `rows`, where they exist.
  METAL_FUNC void store(int m, int n, int rows, float2 values) const thread {
    MLX_ANVIL_UNROLL
    for (int e = 0; e < 2; ++e) {
      if (m + e < rows && n < outputs) {
        out[long(m + e) * outputs + n] = static_cast<T>(values[e]);
      }
    }
  }
};

// Returns zeros that the compiler cannot fold: top bits of addresses. They differ per lane, because
// uniform values live in uniform registers and are moved from there before every use.
template <typename T>
METAL_FUNC uint4 zeros_of_lane(const device T* of_lane) {
  uint4 zeros;
  MLX_ANVIL_UNROLL
  for (int i = 0; i < 4; ++i) {
    zeros[i] = uint(reinterpret_cast<ulong>(of_lane + i * kMatrixColumns) >> 63);
  }
  return zeros;
}

// Processes every place.groups-th tile from `tile` on. With one matrix, stores its products with x;
// with two, gate and up, stores activation(gate) * up.
template <typename T, int kGroup, int kFragments, int kMatrices, int kSimdgroups, typename Added>
METAL_FUNC void multiply_tiles(StagedMatrices<T, kMatrices> matrices,
                               StagedRows<T> rows,
                               MatrixResults<T> results,
                               Added added,
                               constant QuantizedParams& params,
                               MatrixPlace place,
                               uint tile,
                               threadgroup uint4* memory,
                               threadgroup float2 (*shares)[kFragments][32]) {
  enum { kResults = kFragments / kMatrices };  // fragments
  static_assert(int(kResults) <= int(kSimdgroups), "one simdgroup stores each");
  const uint4 zeros = zeros_of_lane(results.out + place.lane);
  GemvMatrixSteps<T, kGroup, kFragments, kMatrices, kSimdgroups> steps(
      matrices, rows, zeros, tile, place.groups, place.simdgroup, place.lane, memory);
  GemvMatrixSums<T, kGroup, kFragments> sums;
  sums.place = fragment_place(place.lane);
  for (; tile < steps.tiles(); tile += place.groups) {
    sums.clear();
    steps.add_tile(sums);
    threadgroup_barrier(
        metal::mem_flags::mem_threadgroup);  // all have read the previous tile's shares
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      shares[place.simdgroup][f][place.lane] = sums.totals[f];
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (place.simdgroup < kResults) {
      float2 totals[kMatrices];
      MLX_ANVIL_UNROLL
      for (int m = 0; m < kMatrices; ++m) {
        totals[m] = float2(0.0f);
        MLX_ANVIL_UNROLL
        for (int i = 0; i < kSimdgroups; ++i) {
          totals[m] += shares[i][m * kResults + place.simdgroup][place.lane];
        }
      }
      const float2 first = SmallCode<T>::unit() * totals[0];
      const float2 last = SmallCode<T>::unit() * totals[kMatrices - 1];
      const int n = results.first_output + 8 * (tile * kResults + place.simdgroup) + sums.place.row;
      const int existing = metal::min(n, results.outputs - 1);
      results.store(sums.place.column, n, rows.rows,
                    float2(result_of<kMatrices>(first.x, last.x, existing, added, params),
                           result_of<kMatrices>(first.y, last.y, existing, added, params)));
    }
  }
}

// Parameters of the gathered matmul kernels, shared by the host (C++) and the kernels (MSL).
//
// Pair p multiplies `product.rows` rows of x by the matrix of an expert (problem.h):
//   out[p] = x[left(p)] times w[expert(p)]
// Arrays are dense: x [lefts, rows, K or N], w [experts, N, K * bits / 32] in 32-bit words, scales
// and biases [experts, N, K / group], out [pairs, rows, N or K].
#pragma once

#include "metal/quantized_matmul/params.h"

#ifndef __METAL__
#include <cstdint>
namespace mlx_anvil {
#endif

struct GatherParams {
  QuantizedParams product;  // of each pair

  int32_t pairs;
  int32_t experts;
  int32_t lefts;
  int32_t pairs_per_left;  // without lhs
  int32_t tiles;           // threadgroups that have a tile
  int32_t row_blocks;      // tiles per pair, if pairs are not sorted
  int32_t unused[2];
};

// For gather_gemm.
struct GatherGemmParams {
  GatherParams gather;
  QuantizedGemmParams gemm;
};

// For gather_table.
struct GatherTableParams {
  int32_t pairs;
  int32_t experts;
  int32_t entries;  // of the table
  int32_t rows;     // of a tile, at most: a power of 2
};

// For gather_sum_pairs.
struct GatherSumParams {
  int64_t columns;
  int32_t pairs;
  int32_t ids;  // rows of the result
};

static_assert(sizeof(GatherParams) == 4 * 16, "same layout in C++ and MSL");
static_assert(sizeof(GatherGemmParams) == 4 * 24, "same layout in C++ and MSL");
static_assert(sizeof(GatherTableParams) == 4 * 4, "same layout in C++ and MSL");
static_assert(sizeof(GatherSumParams) == 4 * 4, "same layout in C++ and MSL");

#ifndef __METAL__
}  // namespace mlx_anvil
#endif

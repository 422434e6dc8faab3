// Which kernel takes a gathered product.
#include <algorithm>
#include <limits>

#include "gather_matmul/gpu_request.h"
#include "quantized_matmul/matrix_tiles.h"

namespace mlx_anvil {

namespace {

constexpr int64_t kFewRows = 8;
constexpr int64_t kTileRows = 32;

// Runs of pairs share a read of their expert's weights. The table is worth a launch if there are
// enough pairs for experts to have several. On Apple's GPUs, one pair of an expert takes longer
// with it than without.
bool suits_table(const GatherRequest& request) {
  const GatherSizes& sizes = request.sizes;
  const bool slower = request.is_transposed() && !device_traits(request.stream.device).matrix_units;
  const int64_t experts_per_pair = slower ? 1 : 4;
  // Matrix units may truncate long sums in float32, so there each row is a GEMV.
  const bool exact =
      request.x.dtype() == mx::float32 && device_traits(request.stream.device).matrix_units;
  return request.ids.sorted && sizes.rows == 1 && !request.ids.lhs && sizes.lefts == sizes.pairs &&
         sizes.pairs > 1 && experts_per_pair * sizes.pairs >= sizes.experts && !exact;
}

// Rows of x that an expert's tiles have on average.
int64_t mean_rows(const GatherRequest& request, bool in_table) {
  return in_table ? ceil_div(request.sizes.pairs, request.sizes.experts) : request.sizes.rows;
}

bool suits_matrix_units(const GatherRequest& request) {
  return device_traits(request.stream.device).matrix_units && request.format &&
         request.x.itemsize() == 2 && request.is_transposed();
}

bool suits_few_matrix(const GatherRequest& request) {
  QuantizedSizes all;
  all.batch = request.sizes.experts;
  all.rows = 1;
  all.columns = request.sizes.columns;
  all.outputs = request.sizes.outputs;
  return takes_matrix_units(*request.format, all, request.of_matrices());
}

GatherChoice few_matrix(const GatherRequest& request, bool in_table, const DeviceTraits& traits) {
  const GatherSizes& sizes = request.sizes;
  const auto matrices = static_cast<int64_t>(request.matrices.size());
  const int64_t tiles_at_once = 2 * traits.multiprocessors;
  const MatrixTile tile = sizes.pairs * sizes.outputs * matrices <= 16 * tiles_at_once
                              ? MatrixTile{16, 8}
                              : MatrixTile{32, 4};
  const int64_t rows = in_table ? kFewRows : std::min(sizes.rows, kFewRows);
  GatherChoice choice;
  choice.kernel = GatherKernel::kFewMatrix;
  choice.in_table = in_table;
  choice.rows = kFewRows;
  choice.columns = tile.outputs / matrices;
  choice.simdgroups = tile.simdgroups;
  choice.threads = 32 * tile.simdgroups;
  choice.stages_x =
      tile.stages(rows, *request.format) + tile.static_memory() <= kMemoryOfThreadgroup;
  choice.memory = tile.stages(choice.stages_x ? rows : 0, *request.format);
  return choice;
}

// The largest tile of gather_gemm and gather_gemm_group that experts fill well enough, with `mean`
// rows on average. By the times of group_tile() in gpu_gemm.cpp.
GemmTile gemm_tile(const QuantizedFormat& format, int64_t mean, const DeviceTraits& traits) {
  if (mean <= 16 || !traits.group_products) {
    // The sums of 64 rows would leave too few registers for the loop over tiles.
    return {GemmKernel::kMatrix, mean <= 16 ? 16 : 32, 64, 4, 3};
  }
  if (mean <= 40) {
    return {GemmKernel::kGroup, 64, 128, 1, 4};
  }
  const bool has_256 = format.bits == 2 || format.bits == 4;
  return mean <= 140 || !has_256 ? GemmTile{GemmKernel::kGroup, 128, 128, 1, 4}
                                 : GemmTile{GemmKernel::kGroup, 256, 128, 1, 3};
}

// The choice of gather_gemm or gather_gemm_group; its rows are 0 if it does not take the arrays.
GatherChoice gemm(const GatherRequest& request, bool in_table, const DeviceTraits& traits) {
  const QuantizedFormat& format = *request.format;
  const GemmTile tile = gemm_tile(format, mean_rows(request, in_table), traits);
  GatherChoice choice;
  choice.kernel =
      tile.kernel == GemmKernel::kGroup ? GatherKernel::kGemmGroup : GatherKernel::kGemm;
  choice.step = tile.terms();
  choice.in_table = in_table;
  choice.columns = tile.results / static_cast<int64_t>(request.matrices.size());
  choice.threads = kGemmThreads;
  choice.memory = tile.memory(format);
  choice.factor_bytes = 16;
  bool aligned = rows_are_vectors({&request.x});
  for (const QuantizedWeightArrays& matrix : request.matrices) {
    choice.factor_bytes = std::min(choice.factor_bytes, factor_bytes(format, tile, matrix));
    aligned = aligned && rows_are_vectors({matrix.w});
  }
  const bool fits = request.sizes.columns * format.bits % 128 == 0 &&
                    choice.memory + kReservedThreadgroupMemory <= traits.threadgroup_memory;
  choice.rows = aligned && fits && choice.factor_bytes > 0 ? tile.rows : 0;
  return choice;
}

}  // namespace

GatherChoice choose_gather(const GatherRequest& request) {
  const bool in_table = suits_table(request);
  const int64_t mean = mean_rows(request, in_table);
  const bool is_few = request.is_transposed() && mean <= kFewRows;
  if (suits_matrix_units(request)) {
    const DeviceTraits traits = device_traits(request.stream.device);
    if (is_few && suits_few_matrix(request)) {
      return few_matrix(request, in_table, traits);
    }
    const GatherChoice choice = gemm(request, in_table, traits);
    if (mean > 1 && choice.rows > 0) {
      return choice;
    }
  }
  GatherChoice choice;
  choice.kernel = is_few ? GatherKernel::kFew : GatherKernel::kTiles;
  choice.in_table = in_table;
  choice.rows = is_few ? kFewRows : kTileRows;
  // Each threadgroup reads the rows of x again; with one row, more threadgroups are worth more.
  const bool one_row = !in_table && request.sizes.rows == 1;
  const int64_t outputs = is_few ? (one_row ? 16 : 32) : 64;
  choice.columns = request.is_transposed() ? outputs / (request.is_gated() ? 2 : 1) : 128;
  choice.threads = kGemvThreads;
  return choice;
}

}  // namespace mlx_anvil

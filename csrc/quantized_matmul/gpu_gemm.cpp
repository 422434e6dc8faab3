// Launches the kernels of products of 9 and more rows on matrix units: gemm_matrix.metal for x W^T
// and gemm_plain.metal for x W.
#include <algorithm>
#include <limits>
#include <utility>

#include "quantized_matmul/gpu.h"
#include "quantized_matmul/gpu_request.h"
#include "quantized_matmul/matrix_tiles.h"

namespace mlx_anvil {

namespace {

constexpr int64_t kMostParts = 8;  // of the terms

// Above, dequantised weights and a dense product take less time. Tiles have 64 rows.
int64_t most_gemm_rows(const QuantizedFormat& format, QuantizedProduct product) {
  return product == QuantizedProduct::kTransposed && format.has_biases() && format.bits == 4 ? 128
                                                                                             : 64;
}

// Tiles of 16 rows leave room for two threadgroups per multiprocessor. A matrix with few rows has
// more of the small tiles.
GemmTile gemm_tile(const QuantizedSizes& sizes,
                   QuantizedProduct product,
                   const DeviceTraits& traits) {
  const int64_t rows = sizes.rows <= 16 ? 16 : sizes.rows <= 32 ? 32 : 64;
  if (product == QuantizedProduct::kPlain) {
    return {false, rows, 128, 2, 3};
  }
  const bool few = sizes.batch * ceil_div(sizes.outputs, 64) < traits.multiprocessors;
  return rows == 16 && few ? GemmTile{true, 16, 32, 8, 3}
                           : GemmTile{true, rows, 64, 4, rows < 64 ? 3 : 2};
}

// Terms and results of a row.
std::pair<int64_t, int64_t> terms_and_results(const QuantizedSizes& sizes,
                                              QuantizedProduct product) {
  return product == QuantizedProduct::kTransposed ? std::pair{sizes.columns, sizes.outputs}
                                                  : std::pair{sizes.outputs, sizes.columns};
}

// Parts of the terms, so that few tiles occupy all multiprocessors.
int64_t parts_of(const GemmTile& tile,
                 const QuantizedSizes& sizes,
                 QuantizedProduct product,
                 const DeviceTraits& traits) {
  constexpr int64_t kFewestSteps = 2;
  const auto [terms, results] = terms_and_results(sizes, product);
  const int64_t tiles =
      sizes.batch * ceil_div(results, tile.results) * ceil_div(sizes.rows, tile.rows);
  return std::clamp<int64_t>(
      std::min(traits.multiprocessors / tiles, ceil_div(terms, tile.terms()) / kFewestSteps), 1,
      kMostParts);
}

}  // namespace

bool suits_quantized_gemm(const QuantizedFormat& format,
                          const QuantizedSizes& sizes,
                          QuantizedProduct product,
                          mx::Dtype dtype,
                          const mx::Device& device) {
  constexpr int64_t kMostGridDepth = 65535;
  const DeviceTraits traits = device_traits(device);
  const bool fits = product == QuantizedProduct::kTransposed
                        ? sizes.columns * format.bits % 128 == 0
                        : sizes.columns % 128 == 0 && sizes.outputs % 8 == 0;
  return traits.is_nvidia() && dtype != mx::float32 && fits && sizes.rows > kQuantizedGemvRows &&
         sizes.rows <= most_gemm_rows(format, product) &&
         sizes.batch <= kMostGridDepth / kMostParts &&
         sizes.outputs * sizes.batch <= std::numeric_limits<int32_t>::max() &&
         gemm_tile(sizes, product, traits).memory(format) + kReservedThreadgroupMemory <=
             traits.threadgroup_memory;
}

bool takes_quantized_gemm(const QuantizedFormat& format,
                          const QuantizedSizes& sizes,
                          QuantizedProduct product,
                          const QuantizedRequest& request) {
  const mx::Device device = request.stream.device;
  return suits_quantized_gemm(format, sizes, product, request.x.dtype(), device) &&
         rows_are_vectors({&request.x, request.matrices[0].w}) &&
         factor_bytes(format, gemm_tile(sizes, product, device_traits(device)),
                      request.matrices[0]) > 0;
}

void launch_quantized_gemm(const QuantizedFormat& format,
                           const QuantizedSizes& sizes,
                           QuantizedProduct product,
                           const QuantizedRequest& request) {
  const DeviceTraits traits = device_traits(request.stream.device);
  const GemmTile tile = gemm_tile(sizes, product, traits);
  const auto [terms, results] = terms_and_results(sizes, product);
  const int64_t steps = ceil_div(terms, tile.terms());
  const int64_t steps_per_part = ceil_div(steps, parts_of(tile, sizes, product, traits));
  const int64_t parts = ceil_div(steps, steps_per_part);
  const QuantizedWeightArrays& weights = request.matrices[0];
  const QuantizedParams common = params_of(format, sizes);
  QuantizedGemmParams params{};
  params.rows = common.rows;
  params.columns = common.columns;
  params.outputs = common.outputs;
  params.group_shift = common.group_shift;
  params.parts = static_cast<int32_t>(parts);
  params.steps_per_part = static_cast<int32_t>(steps_per_part);
  params.factor_bytes = static_cast<int32_t>(factor_bytes(format, tile, weights));
  const KernelName::Piece outputs =
      tile.transposed ? KernelName::Piece(tile.results) : KernelName::Piece("");
  KernelLaunch launched{};
  launched.kernel =
      &kernel_named("quantized_matmul",
                    {tile.transposed ? "quantized_gemm_" : "quantized_gemmplain_",
                     dtype_name(request.x), "_", mode_name(format.kind), bits_in_name(format), "_r",
                     tile.rows, tile.transposed ? "n" : "", outputs},
                    {{kPartsAreStored, parts > 1}, {kStepsAreWhole, terms % tile.terms() == 0}});
  launched.inputs = {&request.x, weights.w, weights.scales,
                     weights.biases ? weights.biases : &request.x};
  launched.params = &params;
  launched.params_size = sizeof(params);
  launched.grid = {static_cast<uint32_t>(ceil_div(results, tile.results)),
                   static_cast<uint32_t>(ceil_div(sizes.rows, tile.rows)),
                   static_cast<uint32_t>(sizes.batch * parts)};
  launched.threadgroup = {kGemmThreads, 1, 1};
  launched.threadgroup_memory = {static_cast<uint32_t>(tile.memory(format))};
  launch_in_parts(parts, request.out, request.stream, [&](mx::array& out) {
    launched.outputs = {&out};
    launch(launched, request.stream);
  });
}

}  // namespace mlx_anvil

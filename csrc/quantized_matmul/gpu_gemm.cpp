// Launches the kernels of products of 9 and more rows on matrix units: gemm_matrix.metal and
// gemm_group.metal for x W^T, and gemm_plain.metal for x W.
#include <algorithm>
#include <limits>
#include <utility>

#include "quantized_matmul/gpu.h"
#include "quantized_matmul/gpu_request.h"
#include "quantized_matmul/matrix_tiles.h"

namespace mlx_anvil {

namespace {

constexpr int64_t kMostParts = 8;  // of the terms
constexpr int64_t kMostRowsBeforeGroups = 32;

// Above, dequantised weights and a dense product take less time.
int64_t most_gemm_rows(const QuantizedFormat& format,
                       QuantizedProduct product,
                       const DeviceTraits& traits) {
  if (product == QuantizedProduct::kPlain) {
    return 64;
  }
  if (traits.group_products) {
    return format.bits <= 4 ? 384 : 192;
  }
  return format.has_biases() && format.bits == 4 ? 128 : 64;
}

bool fits_memory(const GemmTile& tile, const QuantizedFormat& format, const DeviceTraits& traits) {
  return tile.memory(format) + kReservedThreadgroupMemory <= traits.threadgroup_memory;
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

// A tile of gemm_group.metal. With more rows than the largest tiles have, the tile that takes the
// least time: a multiprocessor has one at a time.
GemmTile group_tile(const QuantizedFormat& format,
                    const QuantizedSizes& sizes,
                    const DeviceTraits& traits) {
  constexpr GemmTile k64{GemmKernel::kGroup, 64, 128, 1, 4},
      k128{GemmKernel::kGroup, 128, 128, 1, 4}, k192{GemmKernel::kGroup, 192, 128, 1, 3},
      k256{GemmKernel::kGroup, 256, 128, 1, 3};
  if (sizes.rows <= 192) {
    return sizes.rows <= 64 ? k64 : sizes.rows <= 128 ? k128 : k192;
  }
  // Times per step of 128 columns, measured on an H200, by each other.
  constexpr std::pair<GemmTile, int64_t> kCandidates[] = {{k256, 61}, {k192, 50}, {k128, 40}};
  GemmTile best = k128;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const auto& [tile, step_time] : kCandidates) {
    if (!fits_memory(tile, format, traits)) {
      continue;
    }
    const int64_t tiles =
        sizes.batch * ceil_div(sizes.outputs, tile.results) * ceil_div(sizes.rows, tile.rows);
    const int64_t rounds = ceil_div(tiles, traits.multiprocessors);
    if (rounds * step_time < least) {
      least = rounds * step_time;
      best = tile;
    }
    if (rounds == 1) {  // smaller tiles read w more often
      break;
    }
  }
  return best;
}

// Tiles of 16 rows leave room for two threadgroups per multiprocessor. A matrix with few rows has
// more of the small tiles.
GemmTile gemm_tile(const QuantizedFormat& format,
                   const QuantizedSizes& sizes,
                   QuantizedProduct product,
                   const DeviceTraits& traits) {
  const int64_t rows = sizes.rows <= 16 ? 16 : sizes.rows <= 32 ? 32 : 64;
  if (product == QuantizedProduct::kPlain) {
    return {GemmKernel::kPlain, rows, 128, 2, 3};
  }
  if (traits.group_products && sizes.rows > kMostRowsBeforeGroups) {
    return group_tile(format, sizes, traits);
  }
  const bool few = sizes.batch * ceil_div(sizes.outputs, 64) < traits.multiprocessors;
  return rows == 16 && few ? GemmTile{GemmKernel::kMatrix, 16, 32, 8, 3}
                           : GemmTile{GemmKernel::kMatrix, rows, 64, 4, rows < 64 ? 3 : 2};
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
         sizes.rows <= most_gemm_rows(format, product, traits) &&
         sizes.batch <= kMostGridDepth / kMostParts &&
         sizes.outputs * sizes.batch <= std::numeric_limits<int32_t>::max() &&
         fits_memory(gemm_tile(format, sizes, product, traits), format, traits);
}

bool takes_quantized_gemm(const QuantizedFormat& format,
                          const QuantizedSizes& sizes,
                          QuantizedProduct product,
                          const QuantizedRequest& request) {
  const mx::Device device = request.stream.device;
  return suits_quantized_gemm(format, sizes, product, request.x.dtype(), device) &&
         rows_are_vectors({&request.x, request.matrices[0].w}) &&
         factor_bytes(format, gemm_tile(format, sizes, product, device_traits(device)),
                      request.matrices[0]) > 0;
}

void launch_quantized_gemm(const QuantizedFormat& format,
                           const QuantizedSizes& sizes,
                           QuantizedProduct product,
                           const QuantizedRequest& request) {
  const DeviceTraits traits = device_traits(request.stream.device);
  const GemmTile tile = gemm_tile(format, sizes, product, traits);
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
  const bool by_groups = tile.kernel == GemmKernel::kGroup;
  const char* const op = by_groups           ? "quantized_gemm_group_"
                         : tile.transposed() ? "quantized_gemm_"
                                             : "quantized_gemmplain_";
  const bool names_results = tile.kernel == GemmKernel::kMatrix;
  const KernelName::Piece results_in_name =
      names_results ? KernelName::Piece(tile.results) : KernelName::Piece("");
  KernelLaunch launched{};
  launched.kernel =
      &kernel_named("quantized_matmul",
                    {op, dtype_name(request.x), "_", mode_name(format.kind), bits_in_name(format),
                     "_r", tile.rows, names_results ? "n" : "", results_in_name},
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

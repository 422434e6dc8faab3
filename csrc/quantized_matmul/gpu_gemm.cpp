// Launches the kernels of x W^T for 9 and more rows on matrix units (gemm_matrix.metal).
#include <algorithm>
#include <limits>

#include "quantized_matmul/gpu.h"
#include "quantized_matmul/gpu_request.h"

namespace mlx_anvil {

namespace {

constexpr int64_t kSmallTile = 32;    // rows of w
constexpr int64_t kLargeTile = 64;    // rows of w
constexpr int64_t kThreads = 256;     // all tiles
constexpr int64_t kStepColumns = 128;  // of a simdgroup
constexpr int64_t kMemoryOfSystem = 1 << 10;  // reserved per threadgroup

// Above, dequantised weights and a dense product take less time.
int64_t most_gemm_rows(const QuantizedFormat&) {
  return 160;
}

// An instantiation of gemm_matrix.metal.
struct GemmTile {
  int64_t rows, outputs;
  int64_t along;  // simdgroups that split the columns
  int64_t stages;

  int64_t columns() const { return kStepColumns * along; }

  // Bytes, as GemmTile::kStage.
  int64_t memory(const QuantizedFormat& format) const {
    const int64_t words = along * format.bits;
    const int64_t stride = words % 8 == 0 || words == 4 ? words : words | 1;
    return 16 * stages * (outputs * stride + rows * along * 16 + outputs * along);
  }
};

// Tiles of 16 rows leave room for two threadgroups per multiprocessor. A matrix with few rows has
// more of the small tiles.
GemmTile gemm_tile(const QuantizedSizes& sizes, const DeviceTraits& traits) {
  if (sizes.rows <= 16) {
    const int64_t tiles = sizes.batch * ceil_div(sizes.outputs, kLargeTile);
    return tiles < traits.multiprocessors ? GemmTile{16, kSmallTile, 8, 3}
                                          : GemmTile{16, kLargeTile, 4, 2};
  }
  return sizes.rows <= 32 ? GemmTile{32, kLargeTile, 4, 3} : GemmTile{64, kLargeTile, 4, 2};
}

// Bytes that one copy of scales or of biases has, or 0 if their rows do not consist of such.
int64_t factor_bytes(const QuantizedFormat& format,
                     const GemmTile& tile,
                     const QuantizedWeightArrays& weights) {
  const int64_t of_step = tile.columns() / format.group * weights.scales->itemsize();
  for (const int bytes : {16, 8, 4}) {
    const bool whole = format.has_biases()
                           ? rows_are_vectors({weights.scales, weights.biases}, bytes)
                           : rows_are_vectors({weights.scales}, bytes);
    if (whole && of_step % bytes == 0) {
      return bytes;
    }
  }
  return 0;
}

// Parts of the columns, so that few tiles occupy all multiprocessors.
int64_t parts_of(const GemmTile& tile, const QuantizedSizes& sizes, const DeviceTraits& traits) {
  constexpr int64_t kMostParts = 8, kFewestSteps = 2;
  const int64_t tiles =
      sizes.batch * ceil_div(sizes.outputs, tile.outputs) * ceil_div(sizes.rows, tile.rows);
  const int64_t steps = ceil_div(sizes.columns, tile.columns());
  return std::clamp<int64_t>(std::min(traits.multiprocessors / tiles, steps / kFewestSteps), 1,
                             kMostParts);
}

}  // namespace

bool suits_quantized_gemm(const QuantizedFormat& format,
                          const QuantizedSizes& sizes,
                          QuantizedProduct product,
                          mx::Dtype dtype,
                          const mx::Device& device) {
  const DeviceTraits traits = device_traits(device);
  return traits.is_nvidia() && traits.matrix_units && product == QuantizedProduct::kTransposed &&
         dtype != mx::float32 && sizes.rows > kQuantizedGemvRows &&
         sizes.rows <= most_gemm_rows(format) && sizes.columns * format.bits % 128 == 0 &&
         sizes.outputs * sizes.batch <= std::numeric_limits<int32_t>::max() &&
         gemm_tile(sizes, traits).memory(format) + kMemoryOfSystem <= traits.threadgroup_memory;
}

bool takes_quantized_gemm(const QuantizedFormat& format,
                          const QuantizedSizes& sizes,
                          QuantizedProduct product,
                          const QuantizedRequest& request) {
  const mx::Device device = request.stream.device;
  return suits_quantized_gemm(format, sizes, product, request.x.dtype(), device) &&
         rows_are_vectors({&request.x, request.matrices[0].w}) &&
         factor_bytes(format, gemm_tile(sizes, device_traits(device)), request.matrices[0]) > 0;
}

void launch_quantized_gemm(const QuantizedFormat& format,
                           const QuantizedSizes& sizes,
                           const QuantizedRequest& request) {
  const DeviceTraits traits = device_traits(request.stream.device);
  const GemmTile tile = gemm_tile(sizes, traits);
  const int64_t steps = ceil_div(sizes.columns, tile.columns());
  const int64_t steps_per_part = ceil_div(steps, parts_of(tile, sizes, traits));
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
  KernelLaunch launched{};
  launched.kernel = &kernel_named("quantized_matmul",
                                  {"quantized_gemm_", dtype_name(request.x), "_",
                                   mode_name(format.kind), bits_in_name(format), "_r", tile.rows,
                                   "n", tile.outputs},
                                  {{kPartsAreStored, parts > 1},
                                   {kStepsAreWhole, sizes.columns % tile.columns() == 0}});
  launched.inputs = {&request.x, weights.w, weights.scales,
                     weights.biases ? weights.biases : &request.x};
  launched.params = &params;
  launched.params_size = sizeof(params);
  launched.grid = {static_cast<uint32_t>(ceil_div(sizes.outputs, tile.outputs)),
                   static_cast<uint32_t>(ceil_div(sizes.rows, tile.rows)),
                   static_cast<uint32_t>(sizes.batch * parts)};
  launched.threadgroup = {kThreads, 1, 1};
  launched.threadgroup_memory = {static_cast<uint32_t>(tile.memory(format))};
  if (parts == 1) {
    launched.outputs = {&request.out};
    launch(launched, request.stream);
    return;
  }
  mx::Shape shape = request.out.shape();
  shape.insert(shape.begin(), static_cast<int>(parts));
  Scratch partial(shape, mx::float32, request.stream);
  launched.outputs = {partial.get()};
  launch(launched, request.stream);
  launch_quantized_sum(partial, static_cast<int>(parts), request.out, request.stream);
}

}  // namespace mlx_anvil

#include "quantized_matmul/gpu.h"

#include <algorithm>
#include <limits>
#include <string>

#include "common/allocate.h"
#include "quantized_matmul/dense.h"
#include "quantized_matmul/gpu_request.h"

namespace mlx_anvil {

namespace {

// Offsets in kernels are 32 bits. Words of w have four weights or more.
constexpr int64_t kMostElements = std::numeric_limits<uint32_t>::max();
constexpr int64_t kMostWeights = 4 * kMostElements;

// Kernels that read w once for every 8 rows of x; tiles that unpack w in registers; a dense product
// of dequantised blocks; or tiles of matmul.metal or tiles.metal.
enum class Route { kFewRows, kGemm, kDense, kTiles };

Route route_of(const QuantizedFormat& format,
               const QuantizedSizes& sizes,
               QuantizedProduct product,
               const QuantizedRequest& request) {
  const bool matrix_units = device_traits(request.stream.device).matrix_units;
  if (product == QuantizedProduct::kTransposed && suits_quantized_tiles(sizes, request.stream)) {
    return Route::kTiles;
  }
  if (sizes.rows <= kQuantizedGemvRows) {
    return Route::kFewRows;
  }
  if (!matrix_units || request.x.itemsize() != 2) {
    return Route::kTiles;
  }
  if (takes_quantized_gemm(format, sizes, product, request)) {
    return Route::kGemm;
  }
  const bool several = sizes.rows <= kMostMatrixRows && product == QuantizedProduct::kTransposed;
  return several && takes_matrix_units(format, sizes, request) ? Route::kFewRows : Route::kDense;
}

}  // namespace

bool can_launch_quantized(const QuantizedSizes& sizes,
                          const mx::Stream& stream,
                          std::string* why_not,
                          bool stores_results) {
  constexpr int64_t kLongest = std::numeric_limits<int32_t>::max() / 32;
  constexpr int64_t kMostBatches = 65535;
  if (std::max({sizes.rows, sizes.columns, sizes.outputs}) > kLongest ||
      sizes.batch > kMostBatches) {
    *why_not = "the kernels take at most 2^26 rows and columns, and 65535 matrices";
    return false;
  }
  const int64_t batch = std::max<int64_t>(sizes.batch, 1);
  const int64_t longest = stores_results ? std::max(sizes.columns, sizes.outputs) : sizes.columns;
  if (sizes.outputs * sizes.columns > kMostWeights / batch ||
      sizes.rows * longest > kMostElements / batch) {
    *why_not = "the kernels take fewer than 2^34 weights and 2^32 elements of x or the result";
    return false;
  }
  return can_launch(stream.device, why_not);
}

void quantized_matmul_gpu(const QuantizedFormat& format,
                          const QuantizedSizes& sizes,
                          QuantizedProduct product,
                          const mx::array& x,
                          const QuantizedWeightArrays& weights,
                          mx::array& out,
                          const mx::Stream& stream) {
  const QuantizedRequest request{x, {weights}, out, stream};
  switch (route_of(format, sizes, product, request)) {
    case Route::kDense:
      quantized_dense_gpu(format, sizes, product, x, weights, out, stream);
      return;
    case Route::kGemm:
      out.set_data(allocate(out.nbytes(), stream));
      launch_quantized_gemm(format, sizes, product, request);
      return;
    case Route::kFewRows:
      out.set_data(allocate(out.nbytes(), stream));
      if (product == QuantizedProduct::kTransposed) {
        quantized_gemv_gpu(format, sizes, x, weights, out, stream);
      } else {
        launch_quantized_plain(format, sizes, request);
      }
      return;
    case Route::kTiles:
      out.set_data(allocate(out.nbytes(), stream));
      launch_quantized_tiles(format, sizes, product, request);
  }
}

}  // namespace mlx_anvil

#include "quantized_matmul/mlx_route.h"

#include "common/choices.h"

namespace mlx_anvil {

namespace {

// True if MLX 0.32.4 has a kernel for neural accelerators.
bool has_neural_kernel(const QuantizedFormat& format,
                       const QuantizedSizes& sizes,
                       QuantizedProduct product) {
  constexpr int64_t kTile = 64;
  const bool transposed = product == QuantizedProduct::kTransposed;
  return sizes.columns % kTile == 0 &&
         (transposed || (format.has_biases() && sizes.outputs % kTile == 0));
}

}  // namespace

std::optional<MlxKernel> faster_mlx_product(const QuantizedFormat& format,
                                            const QuantizedSizes& sizes,
                                            QuantizedProduct product,
                                            const mx::array& x,
                                            mx::Stream stream) {
  const DeviceTraits traits = device_traits(stream.device);
  // In float32, MLX's kernels for neural accelerators round to TF32.
  if (traits.is_nvidia() || sizes.rows <= kQuantizedGemvRows || x.itemsize() != 2) {
    return std::nullopt;
  }
  const int64_t rows = choices(stream.device).product_mlx_rows;
  if (rows == 0 || sizes.rows < rows ||
      (traits.apple.neural_accelerators && !has_neural_kernel(format, sizes, product))) {
    return std::nullopt;
  }
  return MlxKernel{"mx.quantized_matmul", reason_for_mlx(traits)};
}

}  // namespace mlx_anvil

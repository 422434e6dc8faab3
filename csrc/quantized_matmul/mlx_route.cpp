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

// True if MLX's kernel for few rows is faster, says the model of time (docs/apple-kernels.md): with
// 4-bit and 2-bit codes. The others are as fast here, or were not estimated.
bool suits_few_rows(const QuantizedFormat& format,
                    const QuantizedSizes& sizes,
                    QuantizedProduct product,
                    const mx::array& x,
                    mx::Stream stream) {
  const bool same_kind = product == QuantizedProduct::kTransposed && sizes.batch == 1 &&
                         format.has_biases() && (format.bits == 4 || format.bits == 2) &&
                         x.itemsize() == 2;
  return same_kind && sizes.rows >= 2 && !device_traits(stream.device).is_nvidia() &&
         sizes.rows <= choices(stream.device).product_mlx_few_rows;
}

}  // namespace

std::optional<MlxKernel> faster_mlx_product(const QuantizedFormat& format,
                                            const QuantizedSizes& sizes,
                                            QuantizedProduct product,
                                            const mx::array& x,
                                            mx::Stream stream) {
  constexpr const char* kName = "mx.quantized_matmul";
  if (suits_few_rows(format, sizes, product, x, stream)) {
    return MlxKernel{kName, "MLX's kernel for few rows is faster, by estimate or the tuning file"};
  }
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
  return MlxKernel{kName, reason_for_mlx(traits)};
}

bool mlx_gated_products_are_faster(const QuantizedFormat& format,
                                   const QuantizedSizes& sizes,
                                   const mx::array& x,
                                   mx::Stream stream) {
  QuantizedSizes one_more = sizes;  // fusing is worth about a row
  ++one_more.rows;
  return sizes.rows > 1 &&
         suits_few_rows(format, one_more, QuantizedProduct::kTransposed, x, stream);
}

}  // namespace mlx_anvil

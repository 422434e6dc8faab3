#include "quantized_matmul/compose.h"

namespace mlx_anvil {

namespace {

mx::array wide(const mx::array& x, mx::Stream s) {
  return mx::astype(x, mx::float32, s);
}

}  // namespace

const char* mode_name(QuantizedKind kind) {
  switch (kind) {
    case QuantizedKind::kMxfp4:
      return "mxfp4";
    case QuantizedKind::kMxfp8:
      return "mxfp8";
    case QuantizedKind::kNvfp4:
      return "nvfp4";
    default:
      return "affine";
  }
}

mx::array compose_dequantized(const QuantizedFormat& format,
                              const QuantizedMatrix& matrix,
                              mx::Stream s) {
  const std::string mode = mode_name(format.kind);
  if (matrix.w.size() == 0) {  // MLX rejects empty matrices
    mx::Shape shape = matrix.scales.shape();
    shape.back() *= format.group;
    return mx::zeros(shape, mx::float32, s);
  }
  if (!format.has_biases()) {
    return mx::dequantize(matrix.w, matrix.scales, std::nullopt, format.group, format.bits, mode,
                          std::nullopt, mx::float32, s);
  }
  // MLX dequantises the codes only. Scales and biases go through ops with derivatives of every
  // order.
  const mx::Shape& shape = matrix.scales.shape();
  const mx::array codes =
      mx::dequantize(matrix.w, mx::ones(shape, mx::float32, s), mx::zeros(shape, mx::float32, s),
                     format.group, format.bits, mode, std::nullopt, mx::float32, s);
  const auto over_group = [&](const mx::array& per_group) {
    return mx::repeat(wide(per_group, s), format.group, -1, s);
  };
  return mx::add(mx::multiply(codes, over_group(matrix.scales), s), over_group(*matrix.biases), s);
}

mx::array compose_quantized_matmul(const QuantizedFormat& format,
                                   QuantizedProduct product,
                                   const mx::array& x,
                                   const QuantizedMatrix& matrix,
                                   mx::Stream s) {
  const mx::array weights = compose_dequantized(format, matrix, s);
  const mx::array right =
      product == QuantizedProduct::kTransposed ? mx::swapaxes(weights, -1, -2, s) : weights;
  return mx::astype(mx::matmul(wide(x, s), right, s), x.dtype(), s);
}

mx::array mlx_quantized_matmul(const QuantizedFormat& format,
                               QuantizedProduct product,
                               const mx::array& x,
                               const QuantizedMatrix& matrix,
                               mx::Stream s) {
  return mx::quantized_matmul(x, matrix.w, matrix.scales, matrix.biases,
                              product == QuantizedProduct::kTransposed, format.group, format.bits,
                              mode_name(format.kind), s);
}

mx::array compose_swiglu(const mx::array& gate, const mx::array& up, mx::Stream s) {
  return mx::multiply(mx::multiply(gate, mx::sigmoid(gate, s), s), up, s);
}

}  // namespace mlx_anvil

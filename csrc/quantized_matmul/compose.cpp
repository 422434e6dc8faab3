#include "quantized_matmul/compose.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common/mlx_ops.h"

namespace mlx_anvil {

namespace {

mx::array wide(const mx::array& x, mx::Stream s) {
  return mx::astype(x, mx::float32, s);
}

// Unpacks affine codes of 3, 5 or 6 bits, 32 of which fill `bits` words. Multiplies and divides by
// powers of two, because a nested vmap of MLX's shifts is wrong (docs/mlx-bugs.md). MLX's
// dequantize shifts such codes.
mx::array unpack_codes(const mx::array& w, int bits, mx::Stream s) {
  std::vector<uint32_t> word, next_word, divisor, factor;
  for (int bit = 0; bit < 32 * bits; bit += bits) {
    const int shift = bit % 32;
    word.push_back(bit / 32);
    next_word.push_back(std::min(bit / 32 + 1, bits - 1));
    divisor.push_back(1u << shift);
    factor.push_back(shift == 0 ? 0 : 1u << (32 - shift));
  }
  const auto constant = [](const std::vector<uint32_t>& values) {
    return mx::array(values.begin(), {32}, mx::uint32);
  };
  const mx::array words = mx::unflatten(w, -1, {-1, bits}, s);
  const mx::array low =
      mx::floor_divide(mx::take(words, constant(word), -1, s), constant(divisor), s);
  const mx::array high =
      mx::multiply(mx::take(words, constant(next_word), -1, s), constant(factor), s);
  const mx::array mask((1u << bits) - 1);
  return wide(mx::flatten(mx::bitwise_and(mx::add(low, high, s), mask, s), -2, -1, s), s);
}

mx::array affine_codes(const QuantizedFormat& format, const mx::array& w, mx::Stream s) {
  if (32 % format.bits != 0) {
    return unpack_codes(w, format.bits, s);
  }
  mx::Shape shape = w.shape();
  shape.back() = shape.back() * 32 / format.bits / format.group;
  return mx::dequantize(w, mx::ones(shape, mx::float32, s), mx::zeros(shape, mx::float32, s),
                        format.group, format.bits, mode_name(format.kind), std::nullopt,
                        mx::float32, s);
}

// ---- formats without biases ---------------------------------------------------------------------

float from_e4m3(int code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const float magnitude = (code & 127) == 127 ? std::numeric_limits<float>::quiet_NaN()
                          : exponent == 0     ? std::ldexp(fraction, -9)
                                              : std::ldexp(8 + fraction, exponent - 10);
  return code < 128 ? magnitude : -magnitude;
}

// MLX and the kernels read 255, the code of NaN, as infinity.
float from_e8m0(int code) {
  return std::ldexp(1.0f, code - 127);
}

float from_e2m1(int code) {
  constexpr float kMagnitudes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return code < 8 ? kMagnitudes[code] : -kMagnitudes[code - 8];
}

// The numbers that codes stand for, from a table of `count` of them. MLX 0.32.4 has no vmap of its
// conversion from 8 bits, and on the CPU it dequantizes no odd number of nvfp4 groups.
mx::array looked_up(const mx::array& codes, float (*number)(int), int count, mx::Stream s) {
  std::vector<float> table;
  for (int code = 0; code < count; ++code) {
    table.push_back(number(code));
  }
  return mx::take(mx::array(table.begin(), {count}), codes, s);
}

mx::array dequantized_floats(const QuantizedFormat& format,
                             const QuantizedMatrix& matrix,
                             mx::Stream s) {
  const mx::array bytes = mx::astype(mx::view(matrix.w, mx::uint8, s), mx::uint32, s);
  const bool is_mxfp8 = format.kind == QuantizedKind::kMxfp8;
  const auto elements = [&] {
    if (is_mxfp8) {
      return looked_up(bytes, from_e4m3, 256, s);
    }
    const mx::array sixteen(uint32_t{16});
    const mx::array high = mx::floor_divide(bytes, sixteen, s);
    const mx::array low = mx::subtract(bytes, mx::multiply(high, sixteen, s), s);
    return looked_up(mx::flatten(mx::stack({low, high}, -1, s), -2, -1, s), from_e2m1, 16, s);
  };
  const bool is_nvfp4 = format.kind == QuantizedKind::kNvfp4;
  const mx::array scales =
      looked_up(mx::astype(matrix.scales, mx::uint32, s), is_nvfp4 ? from_e4m3 : from_e8m0, 256, s);
  return mx::multiply(elements(), mx::repeat(scales, format.group, -1, s), s);
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
  if (matrix.w.size() == 0) {  // MLX rejects empty matrices
    mx::Shape shape = matrix.scales.shape();
    shape.back() *= format.group;
    return mx::zeros(shape, mx::float32, s);
  }
  if (!format.has_biases()) {
    return dequantized_floats(format, matrix, s);
  }
  // MLX dequantises the codes only. Scales and biases go through ops with derivatives of every
  // order.
  const mx::array codes = affine_codes(format, matrix.w, s);
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
  return mx::astype(matrix_product(wide(x, s), right, s), x.dtype(), s);
}

mx::array compose_scale_gradient(const QuantizedFormat& format,
                                 const mx::array& of_weights,
                                 const mx::array& w,
                                 mx::Stream s) {
  if (w.size() == 0) {  // MLX rejects empty matrices
    return compose_bias_gradient(format, of_weights, s);
  }
  return compose_bias_gradient(format, mx::multiply(of_weights, affine_codes(format, w, s), s), s);
}

mx::array compose_bias_gradient(const QuantizedFormat& format,
                                const mx::array& of_weights,
                                mx::Stream s) {
  mx::Shape shape = of_weights.shape();
  shape.back() /= format.group;
  shape.push_back(format.group);
  return mx::sum(mx::reshape(of_weights, shape, s), -1, false, s);
}

mx::array mlx_quantized_matmul(const QuantizedFormat& format,
                               QuantizedProduct product,
                               const mx::array& x,
                               const QuantizedMatrix& matrix,
                               mx::Stream s) {
  if (x.ndim() == 1) {  // MLX 0.32.4 has no gradient in scales and biases then
    const mx::array row = mx::expand_dims(x, 0, s);
    return mx::squeeze(mlx_quantized_matmul(format, product, row, matrix, s), -2, s);
  }
  return mx::quantized_matmul(x, matrix.w, matrix.scales, matrix.biases,
                              product == QuantizedProduct::kTransposed, format.group, format.bits,
                              mode_name(format.kind), s);
}

}  // namespace mlx_anvil

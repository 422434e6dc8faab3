#include "quantized_matmul/quantized_matmul.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "common/broadcast.h"
#include "common/checks.h"
#include "common/errors.h"
#include "quantized_matmul/checks.h"
#include "quantized_matmul/primitive.h"
#include "quantized_matmul/shapeless.h"

namespace mlx_anvil {

namespace {

mx::Shape leading(const mx::array& x) {
  return {x.shape().begin(), x.shape().end() - 2};
}

mx::array with_leading(const mx::array& x, mx::Shape shape, mx::Stream s) {
  shape.push_back(x.shape(-2));
  shape.push_back(x.shape(-1));
  return stretch(x, shape, s);
}

QuantizedMatrix with_leading(const QuantizedMatrix& matrix, const mx::Shape& shape, mx::Stream s) {
  const auto spread = [&](const mx::array& x) { return with_leading(x, shape, s); };
  return {spread(matrix.w), spread(matrix.scales),
          matrix.biases ? std::optional(spread(*matrix.biases)) : std::nullopt};
}

// Runs `product` on x with rank 2 or more: a vector becomes a matrix of one row.
template <class Product>
mx::array with_rows(mx::array x, mx::Stream s, Product product) {
  if (x.ndim() > 1) {
    return product(std::move(x));
  }
  return mx::squeeze(product(mx::expand_dims(x, 0, s)), -2, s);
}

mx::array multiply(const char* op,
                   const mx::array& x,
                   QuantizedMatrix&& matrix,
                   bool transpose,
                   const QuantizedFormat& format,
                   mx::Stream s) {
  const auto product = transpose ? QuantizedProduct::kTransposed : QuantizedProduct::kPlain;
  const mx::Dtype dtype = result_dtype(x, {&matrix});
  convert_for_product(matrix, dtype, s);
  return with_rows(mx::astype(x, dtype, s), s, [&](mx::array rows) {
    if (matrix.w.ndim() == 2) {
      return apply_quantized_matmul(op, format, product, std::move(rows), std::move(matrix), s);
    }
    mx::Shape batch;
    try {
      batch = mx::broadcast_shapes(leading(rows), leading(matrix.w));
    } catch (const std::invalid_argument&) {
      throw_value_error(op, shape_text("x", x) + " and " + shape_text("w", matrix.w) +
                                "; allowed: leading dimensions that broadcast.");
    }
    return apply_quantized_matmul(op, format, product, with_leading(rows, batch, s),
                                  with_leading(matrix, batch, s), s);
  });
}

}  // namespace

mx::array quantized_matmul(const mx::array& x,
                           QuantizedMatrix matrix,
                           bool transpose,
                           const QuantizedOptions& options,
                           mx::StreamOrDevice stream) {
  constexpr const char* op = "quantized_matmul";
  require_kernel_dtypes(op, {{"x", x}});
  const QuantizedFormat format = checked_format(op, options);
  check_matrix(op, "", format, matrix, transpose ? columns_of(x) : std::nullopt);
  check_x(op, x, "w", matrix, transpose ? columns_of(format, matrix) : matrix.w.shape(-2),
          /*over_columns=*/transpose);
  const mx::Stream s = require_stream(op, stream);
  if (traces_shapeless(x, {&matrix})) {
    const auto call = [=](const mx::array& own, std::vector<QuantizedMatrix> matrices) -> Arrays {
      return {quantized_matmul(own, std::move(matrices[0]), transpose, options, s)};
    };
    return shapeless_node(op, s, x, {&matrix}, call)[0];
  }
  return multiply(op, x, std::move(matrix), transpose, format, s);
}

mx::array quantized_gemv(const mx::array& x,
                         QuantizedMatrix matrix,
                         const QuantizedOptions& options,
                         mx::StreamOrDevice stream) {
  constexpr const char* op = "quantized_gemv";
  require_kernel_dtypes(op, {{"x", x}});
  const QuantizedFormat format = checked_format(op, options);
  check_matrix(op, "", format, matrix, columns_of(x));
  check_x(op, x, "w", matrix, columns_of(format, matrix));
  const QuantizedSizes sizes = quantized_sizes(format, x, matrix.w);
  if (sizes.rows > kQuantizedGemvRows) {
    throw_value_error(op, shape_text("x", x) + ", " + std::to_string(sizes.rows) +
                              " rows for one w; allowed: at most " +
                              std::to_string(kQuantizedGemvRows) + ".");
  }
  const mx::Stream s = require_stream(op, stream);
  if (traces_shapeless(x, {&matrix})) {
    const auto call = [=](const mx::array& own, std::vector<QuantizedMatrix> matrices) -> Arrays {
      return {quantized_gemv(own, std::move(matrices[0]), options, s)};
    };
    return shapeless_node(op, s, x, {&matrix}, call)[0];
  }
  return multiply(op, x, std::move(matrix), /*transpose=*/true, format, s);
}

mx::array quantized_swiglu(const mx::array& x,
                           QuantizedMatrix gate,
                           QuantizedMatrix up,
                           const GateOptions& activation,
                           const QuantizedOptions& options,
                           mx::StreamOrDevice stream) {
  constexpr const char* op = "quantized_swiglu";
  require_kernel_dtypes(op, {{"x", x}});
  const QuantizedFormat format = checked_format(op, options);
  check_matrix(op, "gate ", format, gate, columns_of(x));
  check_matrix(op, "up ", format, up, columns_of(x));
  if (gate.w.ndim() != 2 || gate.w.shape() != up.w.shape()) {
    throw_value_error(op, shape_text("gate w", gate.w) + " and " + shape_text("up w", up.w) +
                              "; allowed: equal shapes of rank 2.");
  }
  check_x(op, x, "gate w", gate, columns_of(format, gate));
  const mx::Stream s = require_stream(op, stream);
  if (traces_shapeless(x, {&gate, &up})) {
    const auto call = [=](const mx::array& own, std::vector<QuantizedMatrix> matrices) -> Arrays {
      return {quantized_swiglu(own, std::move(matrices[0]), std::move(matrices[1]), activation,
                               options, s)};
    };
    return shapeless_node(op, s, x, {&gate, &up}, call)[0];
  }
  const mx::Dtype dtype = result_dtype(x, {&gate, &up});
  convert_for_product(gate, dtype, s);
  convert_for_product(up, dtype, s);
  return with_rows(mx::astype(x, dtype, s), s, [&](mx::array rows) {
    return apply_quantized_swiglu(format, std::move(rows), std::move(gate), std::move(up),
                                  activation, s);
  });
}

}  // namespace mlx_anvil

#include "gguf_matmul/gguf_matmul.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "common/broadcast.h"
#include "common/errors.h"
#include "common/ids.h"
#include "common/shapeless.h"
#include "gguf_matmul/primitive.h"

namespace mlx_anvil {

namespace {

GgufFormat format_of(const char* op, const GgufOptions& options) {
  const int bits = options.activation_bits.value_or(0);
  if (options.activation_bits && bits != 8 && bits != 16) {
    throw_value_error(op, "activation_bits is " + std::to_string(bits) + "; allowed: None, 8, 16.");
  }
  return {options.kind, bits};
}

// Repeats x over leading dimensions.
mx::array with_leading(const mx::array& x, mx::Shape shape, mx::Stream s) {
  shape.push_back(x.shape(-2));
  shape.push_back(x.shape(-1));
  return stretch(x, shape, s);
}

mx::Shape leading(const mx::array& x) {
  return {x.shape().begin(), x.shape().end() - 2};
}

mx::array multiply(const char* op,
                   const mx::array& x,
                   const mx::array& w,
                   QuantizedProduct product,
                   const GgufFormat& format,
                   mx::Stream s) {
  const mx::array rows = x.ndim() > 1 ? x : mx::expand_dims(x, 0, s);
  const auto result = [&] {
    if (w.ndim() == 2) {
      return apply_gguf_matmul(op, format, product, rows, w, s);
    }
    mx::Shape batch;
    try {
      batch = mx::broadcast_shapes(leading(rows), leading(w));
    } catch (const std::invalid_argument&) {
      throw_value_error(op, shape_text("x", x) + " and " + shape_text("w", w) +
                                "; allowed: leading dimensions that broadcast.");
    }
    return apply_gguf_matmul(op, format, product, with_leading(rows, batch, s),
                             with_leading(w, batch, s), s);
  }();
  return x.ndim() > 1 ? result : mx::squeeze(result, -2, s);
}

void require_matrix(const char* op, const mx::array& w, bool has_entries) {
  if (w.ndim() != 2 || (has_entries && w.size() == 0)) {
    throw_value_error(op, shape_text("w", w) + "; allowed: rank 2, [N, bytes of a row]" +
                              (has_entries ? ", with at least one row and block." : "."));
  }
}

}  // namespace

mx::array gguf_matmul(const mx::array& x,
                      const mx::array& w,
                      bool transpose,
                      const GgufOptions& options,
                      mx::StreamOrDevice stream) {
  constexpr const char* op = "quantized_matmul";
  require_kernel_dtypes(op, {{"x", x}});
  const GgufFormat format = format_of(op, options);
  check_gguf_matrix(op, "", options.kind, w);
  check_gguf_x(op, x, "w", w, transpose ? gguf_columns(options.kind, w) : w.shape(-2));
  const mx::Stream s = require_stream(op, stream);
  if (traces_shapeless({&x, &w})) {
    return shapeless_node(op, s, {x, w}, [=](const Arrays& in) -> Arrays {
      return {gguf_matmul(in[0], in[1], transpose, options, s)};
    })[0];
  }
  return multiply(op, x, w, transpose ? QuantizedProduct::kTransposed : QuantizedProduct::kPlain,
                  format, s);
}

mx::array gguf_gemv(const mx::array& x,
                    const mx::array& w,
                    const GgufOptions& options,
                    mx::StreamOrDevice stream) {
  constexpr const char* op = "quantized_gemv";
  require_kernel_dtypes(op, {{"x", x}});
  const GgufFormat format = format_of(op, options);
  check_gguf_matrix(op, "", options.kind, w);
  check_gguf_x(op, x, "w", w, gguf_columns(options.kind, w));
  const QuantizedSizes sizes = gguf_sizes(options.kind, x, w);
  if (sizes.rows > kQuantizedGemvRows) {
    throw_value_error(op, shape_text("x", x) + ", " + std::to_string(sizes.rows) +
                              " rows for one w; allowed: at most " +
                              std::to_string(kQuantizedGemvRows) + ".");
  }
  const mx::Stream s = require_stream(op, stream);
  if (traces_shapeless({&x, &w})) {
    return shapeless_node(op, s, {x, w}, [=](const Arrays& in) -> Arrays {
      return {gguf_gemv(in[0], in[1], options, s)};
    })[0];
  }
  return multiply(op, x, w, QuantizedProduct::kTransposed, format, s);
}

mx::array gguf_swiglu(const mx::array& x,
                      const mx::array& gate,
                      const mx::array& up,
                      const GateOptions& activation,
                      const GgufOptions& options,
                      mx::StreamOrDevice stream) {
  constexpr const char* op = "quantized_swiglu";
  require_kernel_dtypes(op, {{"x", x}});
  const GgufFormat format = format_of(op, options);
  check_gguf_matrix(op, "gate ", options.kind, gate);
  check_gguf_matrix(op, "up ", options.kind, up);
  if (gate.ndim() != 2 || gate.shape() != up.shape()) {
    throw_value_error(op, shape_text("gate w", gate) + " and " + shape_text("up w", up) +
                              "; allowed: equal shapes of rank 2.");
  }
  check_gguf_x(op, x, "gate w", gate, gguf_columns(options.kind, gate));
  const mx::Stream s = require_stream(op, stream);
  if (traces_shapeless({&x, &gate, &up})) {
    return shapeless_node(op, s, {x, gate, up}, [=](const Arrays& in) -> Arrays {
      return {gguf_swiglu(in[0], in[1], in[2], activation, options, s)};
    })[0];
  }
  const bool is_vector = x.ndim() == 1;
  const mx::array result =
      apply_gguf_swiglu(format, is_vector ? mx::expand_dims(x, 0, s) : x, gate, up, activation, s);
  return is_vector ? mx::squeeze(result, 0, s) : result;
}

mx::array gguf_embedding(const mx::array& ids,
                         const mx::array& w,
                         GgufKind kind,
                         const std::optional<mx::Dtype>& dtype,
                         mx::StreamOrDevice stream) {
  constexpr const char* op = "quantized_embedding";
  check_gguf_matrix(op, "", kind, w);
  require_matrix(op, w, false);
  if (w.shape(0) == 0 && ids.size() > 0) {
    throw_value_error(
        op, shape_text("w", w) + " and " + shape_text("ids", ids) + "; allowed: at least one row.");
  }
  if (dtype && !is_kernel_dtype(*dtype)) {
    throw_value_error(
        op, "dtype is " + to_text(*dtype) + "; allowed: None, float32, float16, bfloat16.");
  }
  const mx::Stream s = require_stream(op, stream);
  require_ids(op, ids, w.shape(0), {"ids", " and w ", " rows"}, s);
  if (traces_shapeless({&ids, &w})) {
    return shapeless_node(op, s, {ids, w}, [=](const Arrays& in) -> Arrays {
      return {gguf_embedding(in[0], in[1], kind, dtype, s)};
    })[0];
  }
  // Kernels read 32- and 64-bit ids.
  const mx::array wide = ids.itemsize() < 4 ? mx::astype(ids, mx::int32, s) : ids;
  return apply_gguf_rows(op, kind, wide, w, dtype.value_or(mx::bfloat16), s);
}

BestLogits gguf_best_logits(const char* op,
                            const mx::array& x,
                            const mx::array& w,
                            int64_t kept,
                            bool squeezed,
                            const GgufOptions& options,
                            mx::StreamOrDevice stream) {
  require_kernel_dtypes(op, {{"x", x}});
  const GgufFormat format = format_of(op, options);
  check_gguf_matrix(op, "", options.kind, w);
  require_matrix(op, w, true);
  check_gguf_x(op, x, "w", w, gguf_columns(options.kind, w));
  const int most = std::min(w.shape(0), kMostKept);
  if (kept < 1 || kept > most) {
    throw_value_error(op, "k is " + std::to_string(kept) + " and " + shape_text("w", w) +
                              "; allowed: 1 to " + std::to_string(most) + ".");
  }
  const mx::Stream s = require_stream(op, stream);
  if (traces_shapeless({&x, &w})) {
    const Arrays node = shapeless_node(op, s, {x, w}, [=](const Arrays& in) -> Arrays {
      BestLogits best = gguf_best_logits(op, in[0], in[1], kept, squeezed, options, s);
      return {std::move(best.indices), std::move(best.values)};
    });
    return {node[0], node[1]};
  }
  const mx::array logits = multiply(op, x, w, QuantizedProduct::kTransposed, format, s);
  if (kept == 1) {
    const mx::array index = mx::argmax(logits, -1, /*keepdims=*/true, s);
    const mx::array value = mx::take_along_axis(logits, index, -1, s);
    return squeezed ? BestLogits{mx::squeeze(index, -1, s), mx::squeeze(value, -1, s)}
                    : BestLogits{index, value};
  }
  // A stable sort of the negatives: of equal logits, the first wins. NaN is the largest.
  const mx::array best_first = mx::array(-std::numeric_limits<float>::infinity(), logits.dtype());
  const mx::array order =
      mx::argsort(mx::where(mx::isnan(logits, s), best_first, mx::negative(logits, s), s), -1, s);
  mx::Shape start(order.ndim(), 0), stop = order.shape();
  stop.back() = static_cast<int>(kept);
  const mx::array indices = mx::slice(order, start, stop, s);
  return {indices, mx::take_along_axis(logits, indices, -1, s)};
}

}  // namespace mlx_anvil

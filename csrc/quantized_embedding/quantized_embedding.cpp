#include "quantized_embedding/quantized_embedding.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/checks.h"
#include "common/errors.h"
#include "quantized_embedding/primitive.h"
#include "quantized_matmul/shapeless.h"

namespace mlx_anvil {

namespace {

template <class T>
void check_id(T id, int64_t rows) {
  const bool inside = id < 0 ? static_cast<int64_t>(id) >= -rows
                             : static_cast<uint64_t>(id) < static_cast<uint64_t>(rows);
  if (!inside) {
    throw_value_error(kQuantizedEmbedding, "ids has " + std::to_string(id) + " and w " +
                                               std::to_string(rows) +
                                               " rows; allowed: " + std::to_string(-rows) + " to " +
                                               std::to_string(rows - 1) + ".");
  }
}

// Handles views with any strides. Elements repeated by a broadcast are read once.
template <class T>
void check_from(const T* ids, const mx::array& of, size_t axis, int64_t rows) {
  if (axis == of.ndim()) {
    return check_id(*ids, rows);
  }
  const int64_t stride = of.strides()[axis];
  const int count = stride == 0 ? 1 : of.shape()[axis];
  for (int i = 0; i < count; ++i) {
    check_from(ids + i * stride, of, axis + 1, rows);
  }
}

template <class T>
void check_each(const mx::array& ids, int64_t rows) {
  if (!ids.flags().row_contiguous) {
    return check_from(ids.data<T>(), ids, 0, rows);
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    check_id(ids.data<T>()[i], rows);
  }
}

// Checks ids that the host can read now. Lazy ids, and all ids on CUDA, where the host does not
// share memory, are left to the kernels, which clamp.
void check_ids(const mx::array& ids, int64_t rows, mx::Stream s) {
  const bool readable =
      s.device == mx::Device::cpu && ids.is_available() && !ids.is_tracer() && ids.size() > 0;
  if (!readable) {
    return;
  }
  switch (ids.dtype()) {
    case mx::int8:
      return check_each<int8_t>(ids, rows);
    case mx::int16:
      return check_each<int16_t>(ids, rows);
    case mx::int32:
      return check_each<int32_t>(ids, rows);
    case mx::int64:
      return check_each<int64_t>(ids, rows);
    case mx::uint8:
      return check_each<uint8_t>(ids, rows);
    case mx::uint16:
      return check_each<uint16_t>(ids, rows);
    case mx::uint32:
      return check_each<uint32_t>(ids, rows);
    default:
      return check_each<uint64_t>(ids, rows);
  }
}

}  // namespace

mx::array quantized_embedding(const mx::array& ids,
                              QuantizedMatrix matrix,
                              const QuantizedOptions& options,
                              const std::optional<mx::Dtype>& dtype,
                              mx::StreamOrDevice stream) {
  const QuantizedFormat format = checked_format(kQuantizedEmbedding, options);
  check_matrix(kQuantizedEmbedding, "", format, matrix);
  if (matrix.w.ndim() != 2) {
    throw_value_error(kQuantizedEmbedding,
                      describe("w", matrix.w) + "; allowed: rank 2, [rows, packed columns].");
  }
  if (matrix.w.shape(0) == 0 && ids.size() > 0) {
    throw_value_error(
        kQuantizedEmbedding,
        describe("w", matrix.w) + " and " + describe("ids", ids) + "; allowed: at least one row.");
  }
  if (dtype && !is_kernel_dtype(*dtype)) {
    throw_value_error(kQuantizedEmbedding, "dtype is " + to_text(*dtype) +
                                               "; allowed: None, float32, float16, bfloat16.");
  }
  const mx::Stream s = require_stream(kQuantizedEmbedding, stream);
  check_ids(ids, matrix.w.shape(0), s);
  if (traces_shapeless(ids, {&matrix})) {
    const auto call = [=](const mx::array& own, std::vector<QuantizedMatrix> matrices) -> Arrays {
      return {quantized_embedding(own, std::move(matrices[0]), options, dtype, s)};
    };
    return shapeless_node(kQuantizedEmbedding, s, ids, {&matrix}, call)[0];
  }
  // Kernels read 32- and 64-bit ids.
  const mx::array wide = ids.itemsize() < 4 ? mx::astype(ids, mx::int32, s) : ids;
  if (!format.has_biases()) {
    return apply_quantized_embedding(format, wide, std::move(matrix), dtype.value_or(mx::bfloat16),
                                     s);
  }
  const mx::Dtype own = mx::promote_types(matrix.scales.dtype(), matrix.biases->dtype());
  convert(matrix, own, s);
  return mx::astype(apply_quantized_embedding(format, wide, std::move(matrix), own, s),
                    dtype.value_or(own), s);
}

}  // namespace mlx_anvil

#include "quantized_embedding/quantized_embedding.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/checks.h"
#include "common/errors.h"
#include "common/ids.h"
#include "quantized_embedding/primitive.h"
#include "quantized_matmul/shapeless.h"

namespace mlx_anvil {

mx::array quantized_embedding(const mx::array& ids,
                              QuantizedMatrix matrix,
                              const QuantizedOptions& options,
                              const std::optional<mx::Dtype>& dtype,
                              mx::StreamOrDevice stream) {
  const QuantizedFormat format = checked_format(kQuantizedEmbedding, options);
  check_matrix(kQuantizedEmbedding, "", format, matrix);
  if (matrix.w.ndim() != 2) {
    throw_value_error(kQuantizedEmbedding,
                      shape_text("w", matrix.w) + "; allowed: rank 2, [rows, packed columns].");
  }
  if (matrix.w.shape(0) == 0 && ids.size() > 0) {
    throw_value_error(kQuantizedEmbedding, shape_text("w", matrix.w) + " and " +
                                               shape_text("ids", ids) +
                                               "; allowed: at least one row.");
  }
  if (dtype && !is_kernel_dtype(*dtype)) {
    throw_value_error(kQuantizedEmbedding, "dtype is " + to_text(*dtype) +
                                               "; allowed: None, float32, float16, bfloat16.");
  }
  const mx::Stream s = require_stream(kQuantizedEmbedding, stream);
  require_ids(kQuantizedEmbedding, ids, matrix.w.shape(0), {"ids", " and w ", " rows"}, s);
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

#include "quantized_head/quantized_head.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/checks.h"
#include "common/errors.h"
#include "quantized_head/primitive.h"
#include "quantized_matmul/shapeless.h"

namespace mlx_anvil {

namespace {

BestLogits best_logits(const char* op,
                       const mx::array& x,
                       QuantizedMatrix matrix,
                       int64_t kept,
                       bool squeezed,  // drop the axis of length `kept`
                       const QuantizedOptions& options,
                       mx::StreamOrDevice stream) {
  require_kernel_dtypes(op, {{"x", x}});
  const QuantizedFormat format = checked_format(op, options);
  check_matrix(op, "", format, matrix, columns_of(x));
  if (matrix.w.ndim() != 2 || matrix.w.size() == 0) {
    throw_value_error(op, shape_text("w", matrix.w) +
                              "; allowed: rank 2, [N, packed K], with at least one row and group.");
  }
  check_x(op, x, "w", matrix, columns_of(format, matrix));
  const int most = std::min(matrix.w.shape(0), kMostKept);
  if (kept < 1 || kept > most) {
    throw_value_error(op, "k is " + std::to_string(kept) + " and " + shape_text("w", matrix.w) +
                              "; allowed: 1 to " + std::to_string(most) + ".");
  }
  const mx::Stream s = require_stream(op, stream);
  if (traces_shapeless(x, {&matrix})) {
    const auto call = [=](const mx::array& own, std::vector<QuantizedMatrix> matrices) -> Arrays {
      BestLogits best = best_logits(op, own, std::move(matrices[0]), kept, squeezed, options, s);
      return {std::move(best.indices), std::move(best.values)};
    };
    const Arrays node = shapeless_node(op, s, x, {&matrix}, call);
    return {node[0], node[1]};
  }
  const mx::Dtype dtype = result_dtype(x, {&matrix});
  convert_for_product(matrix, dtype, s);
  BestLogits best = apply_quantized_head(op, format, mx::astype(x, dtype, s), std::move(matrix),
                                         static_cast<int>(kept), s);
  return squeezed ? BestLogits{mx::squeeze(best.indices, -1, s), mx::squeeze(best.values, -1, s)}
                  : best;
}

}  // namespace

BestLogits quantized_argmax(const mx::array& x,
                            QuantizedMatrix matrix,
                            const QuantizedOptions& options,
                            mx::StreamOrDevice stream) {
  return best_logits("quantized_argmax", x, std::move(matrix), 1, /*squeezed=*/true, options,
                     stream);
}

BestLogits quantized_topk(const mx::array& x,
                          QuantizedMatrix matrix,
                          int64_t k,
                          const QuantizedOptions& options,
                          mx::StreamOrDevice stream) {
  return best_logits("quantized_topk", x, std::move(matrix), k, /*squeezed=*/false, options,
                     stream);
}

}  // namespace mlx_anvil

#include "norm/after_sum.h"

#include <utility>

#include "common/block.h"
#include "common/checks.h"
#include "common/pending.h"
#include "common/simulate.h"

namespace mlx_anvil {

namespace {

// MLX may have stretched a term. It is an operand of smaller size then, and not a residual.
bool is_stretched(const mx::array& x) {
  return is_pending(x, "Broadcast") ||
         (x.status() == mx::array::Status::available && x.data_size() < x.size());
}

// True if the norm's kernel may compute the sum.
bool is_sum_of_rows(const mx::array& x, mx::Stream s) {
  if (x.is_tracer() || !is_pending(x, "Add") || x.primitive().stream() != s || for_gpu(s) ||
      composing() || x.ndim() == 0 || !is_kernel_dtype(x.dtype())) {
    return false;
  }
  for (const mx::array& term : x.inputs()) {
    if (term.shape() != x.shape() || term.dtype() != x.dtype() || is_stretched(term)) {
      return false;
    }
  }
  return x.inputs().size() == 2;
}

}  // namespace

mx::array norm_after_sum(bool centred,
                         mx::array& x,
                         std::optional<mx::array> weight,
                         NormOptions options,
                         mx::StreamOrDevice stream) {
  const auto norm = centred ? layer_norm : rms_norm;
  const mx::Stream s = require_stream(centred ? "layer_norm" : "rms_norm", stream);
  if (!is_sum_of_rows(x, s)) {
    return norm(x, std::move(weight), std::move(options), s).first;
  }
  const mx::array first = x.inputs()[0];
  options.residual = x.inputs()[1];
  auto [y, sum] = norm(first, std::move(weight), std::move(options), s);
  x.overwrite_descriptor(*sum);
  return y;
}

}  // namespace mlx_anvil

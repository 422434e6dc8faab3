#include "softmax_topk/softmax_topk.h"

#include "common/checks.h"
#include "common/errors.h"
#include "common/shapeless.h"
#include "softmax_topk/primitive.h"

namespace mlx_anvil {

std::pair<mx::array, mx::array> softmax_topk(const mx::array& logits,
                                             const RouterOptions& options,
                                             mx::StreamOrDevice stream) {
  require_kernel_dtypes(kSoftmaxTopk, {{"logits", logits}});
  if (logits.ndim() == 0) {
    throw_value_error(
        kSoftmaxTopk,
        "logits has shape (); allowed: one axis or more; the last one indexes the experts.");
  }
  require_chosen(options, logits.shape());
  const mx::Stream s = require_stream(kSoftmaxTopk, stream);
  if (traces_shapeless({&logits})) {
    const Arrays node =
        shapeless_node(kSoftmaxTopk, s, {logits}, [options, s](const Arrays& in) -> Arrays {
          const auto [weights, indices] = softmax_topk(in[0], options, s);
          return {weights, indices};
        });
    return {node[0], node[1]};
  }
  const Arrays outputs = apply_softmax_topk(options, logits, s);
  return {outputs[0], outputs[1]};
}

}  // namespace mlx_anvil

#include "softmax_topk/softmax_topk.h"

#include <cmath>
#include <string>

#include "common/checks.h"
#include "common/errors.h"
#include "common/shapeless.h"
#include "softmax_topk/primitive.h"

namespace mlx_anvil {

namespace {

void require_bias(const mx::array& logits, const mx::array& bias) {
  require_kernel_dtypes(kSoftmaxTopk, {{"e_score_correction_bias", bias}});
  const mx::Shape allowed = {logits.shape(-1)};
  if (bias.shape() != allowed) {
    throw_value_error(kSoftmaxTopk, "e_score_correction_bias has shape " + to_text(bias.shape()) +
                                        " and logits has shape " + to_text(logits.shape()) +
                                        "; allowed: shape " + to_text(allowed) + ".");
  }
}

}  // namespace

std::pair<mx::array, mx::array> softmax_topk(const mx::array& logits,
                                             const std::optional<mx::array>& bias,
                                             RouterOptions options,
                                             mx::StreamOrDevice stream) {
  require_kernel_dtypes(kSoftmaxTopk, {{"logits", logits}});
  if (logits.ndim() == 0) {
    throw_value_error(
        kSoftmaxTopk,
        "logits has shape (); allowed: one axis or more; the last one indexes the experts.");
  }
  if (!std::isfinite(options.scale)) {
    throw_value_error(kSoftmaxTopk, "routed_scaling_factor is " + std::to_string(options.scale) +
                                        "; allowed: a finite number.");
  }
  options.has_bias = bias.has_value();
  require_chosen(options, logits.shape());
  if (bias) {
    require_bias(logits, *bias);
  }
  const mx::Stream s = require_stream(kSoftmaxTopk, stream);
  if (traces_shapeless({&logits, bias ? &*bias : nullptr})) {
    Arrays inputs = {logits};
    OptionalInputs::append(inputs, bias);
    const Arrays node =
        shapeless_node(kSoftmaxTopk, s, std::move(inputs), [bias, options, s](const Arrays& in) {
          std::optional<mx::array> own = bias;
          OptionalInputs(in, 1).replace(own);
          const auto [weights, indices] = softmax_topk(in[0], own, options, s);
          return Arrays{weights, indices};
        });
    return {node[0], node[1]};
  }
  Arrays inputs = {logits};
  if (bias) {
    inputs.push_back(mx::stop_gradient(mx::astype(*bias, mx::float32, s), s));
  }
  const Arrays outputs = apply_softmax_topk(options, inputs, s);
  return {outputs[0], outputs[1]};
}

}  // namespace mlx_anvil

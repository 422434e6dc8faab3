// causal_conv1d and its gradients in MLX ops.
#pragma once

#include <optional>

#include "common/primitive.h"

namespace mlx_anvil {

struct ConvConfig {
  bool silu = true;
  bool has_bias = false, has_state = false, has_lengths = false;

  bool operator==(const ConvConfig&) const = default;
};

// The arrays of a call. With a weight [groups, channels, width] and a bias [groups, channels], each
// group of batch entries has its own: that is how vmap maps them.
struct ConvView {
  const mx::array *x, *weight;
  const mx::array *bias, *state, *lengths;  // null if absent; lengths are int32

  int width() const { return weight->shape(-1); }
  int groups() const { return weight->ndim() == 3 ? weight->shape(0) : 1; }
  mx::Shape state_shape() const { return {x->shape(0), width() - 1, x->shape(2)}; }
};

// y and the new state.
Arrays compose_conv(const ConvConfig& config, const ConvView& in, mx::Stream stream);

// Gradients of x, of the state if there is one, and if `sums` of the weight and of a bias.
Arrays compose_conv_backward(const ConvConfig& config,
                             bool sums,
                             const ConvView& in,
                             const mx::array& d_y,
                             const mx::array& d_new_state,
                             mx::Stream stream);

}  // namespace mlx_anvil

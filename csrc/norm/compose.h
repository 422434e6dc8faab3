// What a norm is given, and its definition in MLX ops.
#pragma once

#include <optional>

#include "common/primitive.h"

namespace mlx_anvil {

// All that a call fixes but its arrays.
struct NormConfig {
  bool centred = false;  // layer_norm: the mean is taken off
  bool has_residual = false, has_gate = false, has_weight = false, has_bias = false;
  float eps = 0;
  float weight_offset = 0;

  const char* op() const { return centred ? "layer_norm" : "rms_norm"; }
  bool operator==(const NormConfig&) const = default;
};

// Weight and bias are [columns], or [groups, columns] where as many equal groups of neighbouring
// rows have one of their own (vmap makes such).
struct NormInputs {
  mx::array x;
  std::optional<mx::array> residual, gate, weight, bias;
};

// The same arrays where a primitive has them, to be read: a copy would keep their memory from
// becoming an output's. Null where a call has none.
struct NormView {
  const mx::array* x = nullptr;
  const mx::array* residual = nullptr;
  const mx::array* gate = nullptr;
  const mx::array* weight = nullptr;
  const mx::array* bias = nullptr;

  // Weight or bias, which have one dtype.
  const mx::array* vector() const { return weight ? weight : bias; }
};

// Which gradients a backward has beside those of x (which is the residual's too) and of the gate.
struct NormGradients {
  bool weight = false, bias = false;
  bool operator==(const NormGradients&) const = default;
};

// y, and h = x + residual where there is a residual.
Arrays compose_norm(const NormConfig& config, const NormInputs& in, mx::Stream stream);

// The gradients of x, of the gate, of the weight and of the bias: those that there are, in this
// order. `in.x` is h, and `d_h` is given where h was a result of the call.
Arrays compose_norm_backward(const NormConfig& config,
                             const NormGradients& wanted,
                             const NormInputs& in,
                             const mx::array& d_y,
                             const std::optional<mx::array>& d_h,
                             mx::Stream stream);

}  // namespace mlx_anvil

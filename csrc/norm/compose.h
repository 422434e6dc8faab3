// The arguments of a norm, and its definition in MLX ops.
#pragma once

#include <optional>

#include "common/primitive.h"

namespace mlx_anvil {

// Everything about a call except its arrays.
struct NormConfig {
  bool centred = false;  // layer_norm: subtract the mean
  bool has_residual = false, has_gate = false, has_weight = false, has_bias = false;
  bool gate_is_sigmoid = false;  // else silu
  float eps = 0;
  float weight_offset = 0;

  const char* op() const { return centred ? "layer_norm" : "rms_norm"; }
  bool operator==(const NormConfig&) const = default;
};

// Weight and bias are [columns], or [groups, columns] if each of `groups` equal runs of adjacent
// rows has its own. vmap creates groups.
struct NormInputs {
  mx::array x;
  std::optional<mx::array> residual, gate, weight, bias;
};

// The same arrays as pointers, for a primitive's evaluation: a copy would prevent their memory from
// being donated to an output. Absent arrays are null.
struct NormView {
  const mx::array* x = nullptr;
  const mx::array* residual = nullptr;
  const mx::array* gate = nullptr;
  const mx::array* weight = nullptr;
  const mx::array* bias = nullptr;

  // Weight or bias. If both exist they have the same dtype.
  const mx::array* vector() const { return weight ? weight : bias; }
};

// The optional gradients of a backward. Those of x (also the residual's) and of the gate are always
// computed.
struct NormGradients {
  bool weight = false, bias = false;
  bool operator==(const NormGradients&) const = default;
};

// Returns y, and h = x + residual if there is a residual.
Arrays compose_norm(const NormConfig& config, const NormInputs& in, mx::Stream stream);

// Returns the gradients of x, gate, weight and bias, in this order, as far as they exist or are
// wanted. `in.x` is h. `d_h` is given if h was an output of the call.
Arrays compose_norm_backward(const NormConfig& config,
                             const NormGradients& wanted,
                             const NormInputs& in,
                             const mx::array& d_y,
                             const std::optional<mx::array>& d_h,
                             mx::Stream stream);

}  // namespace mlx_anvil

// The arguments of gated_delta, and its definition in MLX ops, in float32 for every dtype. It is
// the fallback, and the definition from which derivatives without a kernel are taken.
#pragma once

#include <optional>

#include "common/primitive.h"

namespace mlx_anvil {

// Everything about a call except its arrays.
struct GatedDeltaConfig {
  bool has_state = false, has_lengths = false, returns_states = false;
  bool normalizes = false;
  float eps = 0, q_scale = 1;

  bool operator==(const GatedDeltaConfig&) const = default;
};

struct GatedDeltaInputs {
  mx::array q, k;  // [batch, length, key_heads, key_dim], of one dtype with v
  mx::array v;     // [batch, length, value_heads, value_dim]
  mx::array g;     // [batch, length, value_heads], or a factor per channel of the key
  mx::array beta;  // [batch, length, value_heads]
  std::optional<mx::array> state;      // float32 [batch, value_heads, value_dim, key_dim]
  std::optional<mx::array> lengths;    // int32 [batch]
  std::optional<mx::array> positions;  // int32 [batch or 1, positions]
};

// Returns y, the last state, and the states after the steps of `positions`.
Arrays compose_gated_delta(const GatedDeltaConfig& config,
                           const GatedDeltaInputs& in,
                           mx::Stream s);

}  // namespace mlx_anvil

// The arguments of the recurrence (problem.h), and its definition in MLX ops, in float32 for every
// dtype. It is the fallback, and the definition from which derivatives without a kernel are taken.
#pragma once

#include <optional>

#include "common/primitive.h"
#include "gated_delta/gated_delta.h"

namespace mlx_anvil {

// Everything about a call except its arrays.
struct GatedDeltaConfig {
  const char* op = kGatedDelta;  // in messages
  bool corrects = true;          // false: ssd_scan
  bool has_state = false, has_skip = false, has_gate = false;
  bool has_lengths = false, returns_states = false;
  bool normalizes = false;
  float eps = 0, q_scale = 1;

  bool operator==(const GatedDeltaConfig&) const = default;

  // Where the arrays are among a node's inputs, and their gradients among its outputs.
  static constexpr size_t kState = 5;
  size_t skip_at() const { return kState + has_state; }
  size_t gate_at() const { return skip_at() + has_skip; }
  size_t lengths_at() const { return gate_at() + has_gate; }
  size_t positions_at() const { return lengths_at() + has_lengths; }
  size_t count() const { return positions_at() + returns_states; }
  bool is_gate(size_t i) const { return has_gate && i == gate_at(); }
};

struct GatedDeltaInputs {
  mx::array q, k;  // [batch, length, key_heads, key_dim], of one dtype with v
  mx::array v;     // [batch, length, value_heads, value_dim]
  mx::array g;     // [batch, length, value_heads], or a factor per channel of the key
  mx::array beta;  // [batch, length, value_heads]
  std::optional<mx::array> state;      // float32 [batch, value_heads, value_dim, key_dim]
  std::optional<mx::array> skip;       // float32 [batch, length, value_heads]
  std::optional<mx::array> gate;       // of the shape and dtype of v
  std::optional<mx::array> lengths;    // int32 [batch]
  std::optional<mx::array> positions;  // int32 [batch or 1, positions]
};

// Returns y, the last state, and the states after the steps of `positions`.
Arrays compose_gated_delta(const GatedDeltaConfig& config,
                           const GatedDeltaInputs& in,
                           mx::Stream s);

}  // namespace mlx_anvil

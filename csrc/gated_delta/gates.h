// The op function gated_delta_gates: decays and rates for gated_delta.
#pragma once

#include <optional>
#include <utility>

#include "common/primitive.h"

namespace mlx_anvil {

inline constexpr const char* kGatedDeltaGates = "gated_delta_gates";  // in messages

struct GatesConfig {
  std::optional<float> lower_bound;
  float rate_scale = 1;  // of beta

  bool operator==(const GatesConfig&) const = default;
};

// a and b have one dtype; A_log and dt_bias have it too, or float32.
struct GatesInputs {
  mx::array a;        // [..., heads] or [..., heads, channels]
  mx::array b;        // [..., heads]
  mx::array a_log;    // [heads]
  mx::array dt_bias;  // the last axis of a, or the last two
};

// Returns g, with the shape of a, and beta, with that of b; float32.
Arrays apply_gates(const GatesConfig& config, GatesInputs in, mx::Stream stream);

std::pair<mx::array, mx::array> gated_delta_gates(const mx::array& a,
                                                  const mx::array& b,
                                                  const mx::array& a_log,
                                                  const mx::array& dt_bias,
                                                  const GatesConfig& config,
                                                  mx::StreamOrDevice stream = {});

}  // namespace mlx_anvil

// The step sizes and decays of ssd_scan, as a graph node.
#pragma once

#include <optional>

#include "common/primitive.h"

namespace mlx_anvil {

struct SsdStepsConfig {
  bool has_bias = false, has_lengths = false, softplus = false;
  float least = 0, most = 0;  // of a step size

  bool operator==(const SsdStepsConfig&) const = default;
};

// Returns decays and step sizes, [batch, length, heads] in float32. `dt` is [batch, length, heads],
// `a` and `bias` float32 [heads], `lengths` int32 [batch]: what is in padding, NaN too, has no part
// in a result.
Arrays apply_ssd_steps(SsdStepsConfig config,
                       const mx::array& dt,
                       const mx::array& a,
                       const std::optional<mx::array>& bias,
                       const std::optional<mx::array>& lengths,
                       mx::Stream s);

}  // namespace mlx_anvil

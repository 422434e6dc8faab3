// rope as a graph node: configuration, inputs, and the two ways to build it.
#pragma once

#include <optional>

#include "common/primitive.h"
#include "rope/frequencies.h"

namespace mlx_anvil {

struct RopeConfig {
  int pairs;
  bool traditional;
  bool inverse;  // rotate by the negative angle
  RopeFrequencies frequencies;

  bool operator==(const RopeConfig&) const = default;
};

struct RopePositions {
  mx::array offset;                // int32 or int64, of shape (), (1,) or (batch,)
  std::optional<mx::array> freqs;  // float32 (pairs,)

  // From a node's inputs: the offset at `first`, then freqs if given.
  static RopePositions of(const Arrays& inputs, size_t first) {
    return {inputs[first],
            inputs.size() > first + 1 ? std::optional(inputs[first + 1]) : std::nullopt};
  }
};

// Rotates one or two arrays [batch, heads, length, head_dim] in one kernel. Only their number of
// heads may differ.
Arrays apply_rope(const RopeConfig& config, Arrays tensors, RopePositions positions, mx::Stream s);

// The same computation in MLX ops, differentiable in the arrays and in freqs.
Arrays compose_rope(const RopeConfig& config,
                    const Arrays& tensors,
                    const RopePositions& positions,
                    mx::Stream s);

}  // namespace mlx_anvil

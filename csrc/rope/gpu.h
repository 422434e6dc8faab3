#pragma once

#include "rope/primitive.h"

namespace mlx_anvil {

// Outputs have their memory.
void rope_gpu(const RopeConfig& config,
              const Arrays& tensors,
              const RopePositions& positions,
              Arrays& outputs,
              const mx::Stream& stream);

}  // namespace mlx_anvil

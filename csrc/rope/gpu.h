// The launch of rope's Metal kernel, called by the primitive.
#pragma once

#include "rope/primitive.h"

namespace mlx_anvil {

// `outputs` must be allocated.
void rope_gpu(const RopeConfig& config,
              const Arrays& tensors,
              const RopePositions& positions,
              Arrays& outputs,
              const mx::Stream& stream);

}  // namespace mlx_anvil

// Launches of gated_delta's Metal kernels, called by the primitives. The outputs are allocated.
#pragma once

#include "gated_delta/compose.h"

namespace mlx_anvil {

// The new state may share the memory of the old one.
void gated_delta_gpu(const GatedDeltaConfig& config,
                     const GatedDeltaInputs& in,
                     Arrays& outputs,
                     const mx::Stream& stream);

// `d_outputs` and `outputs`: as apply_gated_delta_backward() has them.
void gated_delta_backward_gpu(const GatedDeltaConfig& config,
                              const GatedDeltaInputs& in,
                              const Arrays& d_outputs,
                              Arrays& outputs,
                              const mx::Stream& stream);

}  // namespace mlx_anvil

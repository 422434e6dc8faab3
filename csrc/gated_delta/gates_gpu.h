// Launches of gated_delta_gates' Metal kernels, called by the primitives. The outputs are
// allocated.
#pragma once

#include "gated_delta/gates.h"

namespace mlx_anvil {

void gated_delta_gates_gpu(const GatesConfig& config,
                           const Arrays& inputs,
                           Arrays& outputs,
                           const mx::Stream& stream);

// `inputs` and `outputs`: those of apply_gates_backward().
void gated_delta_gates_backward_gpu(const GatesConfig& config,
                                    const Arrays& inputs,
                                    Arrays& outputs,
                                    const mx::Stream& stream);

}  // namespace mlx_anvil

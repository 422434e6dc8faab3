// Launches of gated_delta's kernels that take chunks of steps to matrix units.
#pragma once

#include "gated_delta/gpu_request.h"

namespace mlx_anvil {

// Returns true if these kernels serve the call: many steps, a key dim of 64 or 128, no gate, no
// states but the last, and a state of whole vectors. The others take a step after the other.
bool takes_chunks(const DeltaRequest& request);

void launch_chunk_forward(const DeltaRequest& request, Arrays& outputs);

// `d_outputs` and `outputs`: as gated_delta_backward_gpu() has them.
void launch_chunk_backward(const DeltaRequest& request, const Arrays& d_outputs, Arrays& outputs);

}  // namespace mlx_anvil

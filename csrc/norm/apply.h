#pragma once

#include "norm/compose.h"

namespace mlx_anvil {

// Adds the norm to the graph, or its composition where `stream` has no kernels. Dtypes are agreed
// already. Gives y, and h where there is a residual.
Arrays apply_norm(const NormConfig& config, NormInputs in, mx::Stream stream);

// `inputs`: h, then the gate, the weight and the bias that the call has, d_y, and d_h where h was
// its result. Gives the gradients in the order of `compose_norm_backward`.
Arrays apply_norm_backward(const NormConfig& config,
                           const NormGradients& wanted,
                           const Arrays& inputs,
                           mx::Stream stream);

}  // namespace mlx_anvil

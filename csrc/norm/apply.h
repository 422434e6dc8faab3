// Builds the graph nodes of the norms. Called by the op functions (norm.cpp) and by the primitives'
// derivatives.
#pragma once

#include "norm/compose.h"

namespace mlx_anvil {

// Adds the norm to the graph, or its composition if `stream` has no kernels. The inputs' dtypes
// must already match. Returns y, and h if there is a residual.
Arrays apply_norm(const NormConfig& config, NormInputs in, mx::Stream stream);

// `inputs`: h, then those of gate, weight and bias that the call has, d_y, and d_h if h was an
// output. Returns the gradients in the order of compose_norm_backward().
Arrays apply_norm_backward(const NormConfig& config,
                           const NormGradients& wanted,
                           const Arrays& inputs,
                           mx::Stream stream);

}  // namespace mlx_anvil

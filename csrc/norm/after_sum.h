// Norms of a sum that is still to be computed: one kernel computes both.
#pragma once

#include "norm/norm.h"

namespace mlx_anvil {

// The norm of x, without a residual. If x is a sum x1 + x2 by MLX that no evaluation has reached,
// one node computes it and the norm, with the bits of the sum and then the norm. `x` becomes that
// node's second output. Other arrays that refer to MLX's sum keep it.
mx::array norm_after_sum(bool centred,
                         mx::array& x,
                         std::optional<mx::array> weight,
                         NormOptions options,
                         mx::StreamOrDevice stream = {});

}  // namespace mlx_anvil

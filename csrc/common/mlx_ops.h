// MLX's ops for composed graphs, with derivatives that MLX 0.32.4 lacks. mx.export_function()
// writes them as MLX's own.
#pragma once

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

// mx::matmul, with a forward-mode derivative that vmap takes, and empty products that leave other
// memory alone: that of MLX raises an error, those write to freed memory (docs/mlx-bugs.md).
mx::array matrix_product(const mx::array& a, const mx::array& b, mx::Stream stream);

// mx::where, with a gradient that chooses too. That of MLX multiplies by 0, so an infinite one
// becomes NaN where it is not chosen.
mx::array choose(const mx::array& condition,
                 const mx::array& a,
                 const mx::array& b,
                 mx::Stream stream);

}  // namespace mlx_anvil

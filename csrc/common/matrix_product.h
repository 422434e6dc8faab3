// Matrix products of composed graphs.
#pragma once

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

// mx::matmul, with a forward-mode derivative that vmap takes: that of MLX 0.32.4 raises an error
// (docs/troubleshooting.md). mx.export_function() writes it as MLX's own product.
mx::array matrix_product(const mx::array& a, const mx::array& b, mx::Stream stream);

}  // namespace mlx_anvil

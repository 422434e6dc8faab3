// Sums of rows by their ids, differentiable to any order.
#pragma once

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

// Returns a table [rows, K] whose row i is the sum of the rows of x [n, K] that have id i. ids [n]
// are integers from -rows to rows - 1.
mx::array sum_rows(const mx::array& x, const mx::array& ids, int rows, mx::Stream s);

}  // namespace mlx_anvil

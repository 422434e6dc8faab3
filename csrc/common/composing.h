// What graphs of MLX ops do otherwise inside `composed()`, so that MLX can export them, also for
// other shapes than those of the example.
#pragma once

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

// A dense copy of `x` for kernels that cannot walk it. MLX exports no mx::contiguous, and its ops
// need none.
mx::array dense_copy(const mx::array& x, mx::Stream stream);

// The length of an axis of `x`, and its indices from 0 on; int32. mx::arange fixes a length.
mx::array length_of(const mx::array& x, int axis, mx::Stream stream);
mx::array indices_of(const mx::array& x, int axis, mx::Stream stream);

}  // namespace mlx_anvil

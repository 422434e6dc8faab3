// Helpers for compositions that mx.export_function() must be able to export inside `composed()`,
// possibly for shapes other than the example's.
#pragma once

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

// Returns a dense copy of `x`, for kernels that cannot handle its strides. Inside composed() it
// returns `x`: MLX cannot export mx::contiguous, and MLX's ops accept any strides.
mx::array dense_copy(const mx::array& x, mx::Stream stream);

// The length of an axis of `x`, and its indices counted from 0; int32. mx::arange would fix the
// length.
mx::array length_of(const mx::array& x, int axis, mx::Stream stream);
mx::array indices_of(const mx::array& x, int axis, mx::Stream stream);

}  // namespace mlx_anvil

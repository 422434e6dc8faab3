// The axis of mx::vmap, as every primitive's `batched` folds it into the arrays of one call.
#pragma once

#include "common/primitive.h"

namespace mlx_anvil {

// The length of the axis. An input without it has -1 in `axes`.
int vmap_length(const Arrays& inputs, const std::vector<int>& axes);

// Moves the axis of x from `from` to `to`. An x without it gets one of length 1.
mx::array with_vmap_axis(const mx::array& x, int from, int to, mx::Stream stream);

// The same, and repeats an x without the axis `length` times.
mx::array repeated_over_vmap(const mx::array& x, int from, int to, int length, mx::Stream stream);

// Undoes that an axis of `length` was folded into the first axis of all outputs. It comes in front.
Arrays unfolded_from_batch(Arrays outputs, int length, mx::Stream stream);

// All inputs with the axis in front.
Arrays with_vmap_in_front(const Arrays& inputs, const std::vector<int>& axes, mx::Stream stream);

}  // namespace mlx_anvil

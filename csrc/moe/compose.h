// moe_permute and moe_combine in MLX ops: the fallback, and the source of derivatives without a
// kernel. Arrays are those of primitive.h.
#pragma once

#include "common/primitive.h"
#include "moe/primitive.h"
#include "moe/problem.h"

namespace mlx_anvil {

// The sizes of a call with arrays of these shapes: inverse (or ids) [batch, tokens.., k].
MoeSizes moe_sizes(const mx::array& inverse, int batch_axes, int64_t columns);

// [batch, *last]
mx::Shape moe_batch_shape(const mx::array& inverse, int batch_axes, mx::Shape last);

// Returns offsets, order, inverse, sorted.
Arrays compose_moe_sort(const mx::array& ids, int64_t experts, int batch_axes, mx::Stream stream);

mx::array compose_moe_spread(const mx::array& x,
                             const mx::array& inverse,
                             int batch_axes,
                             mx::Stream stream);

mx::array compose_moe_combine(const MoeCombineArrays& arrays, int batch_axes, mx::Stream stream);

// Returns the gradients in y, weights, shared and shared_gate, as far as they are given. The last
// two come only with a gate.
Arrays compose_moe_backward(const mx::array& d_out,
                            const MoeCombineArrays& arrays,
                            int batch_axes,
                            mx::Stream stream);

}  // namespace mlx_anvil

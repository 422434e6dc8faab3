// Broadcasts whose gradients meet the accuracy promised in docs/numerics.md. On the CPU, MLX sums
// the gradient of a broadcast sequentially and in its own dtype.
#pragma once

#include "common/primitive.h"

namespace mlx_anvil {

// mx::broadcast_to, with sum_to() as its gradient.
mx::array stretch(const mx::array& x, const mx::Shape& shape, mx::Stream stream);

// Broadcasts x to the shape of `other`. Works in shapeless graphs too.
mx::array stretch_like(const mx::array& x, const mx::array& other, mx::Stream stream);

// Broadcasts a vector [columns] to `rows` [..., columns]. With [groups, columns], each group of
// rows has its own.
mx::array stretch_to_rows(const mx::array& vector, const mx::array& rows, mx::Stream stream);

// The gradient of that: sums rows to [columns] or [groups, columns].
mx::array sum_rows_to(const mx::array& rows, const mx::Shape& shape, mx::Stream stream);

// mx::broadcast_arrays, with sum_to() as its gradient.
Arrays stretch_arrays(const Arrays& arrays, mx::Stream stream);

// Sums x over the axes along which an array of `shape` broadcasts to it. Sums are float32, and
// their error does not grow with the number of terms.
mx::array sum_to(const mx::array& x, const mx::Shape& shape, mx::Stream stream);

}  // namespace mlx_anvil

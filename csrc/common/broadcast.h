// Broadcasts whose gradients keep the promise of docs/numerics.md. MLX adds up the gradient of a
// broadcast one term after the other, in its own dtype, on the CPU.
#pragma once

#include "common/primitive.h"

namespace mlx_anvil {

// mx::broadcast_to. Its gradient is sum_to().
mx::array stretch(const mx::array& x, const mx::Shape& shape, mx::Stream stream);

// x in the shape of `other`, with which it broadcasts; also in graphs for any shapes.
mx::array stretch_like(const mx::array& x, const mx::array& other, mx::Stream stream);

// mx::broadcast_arrays, likewise.
Arrays stretch_arrays(const Arrays& arrays, mx::Stream stream);

// The sum over those axes along which an array of `shape` is stretched to the shape of x; in
// float32, by sums whose error does not grow with the number of terms.
mx::array sum_to(const mx::array& x, const mx::Shape& shape, mx::Stream stream);

}  // namespace mlx_anvil

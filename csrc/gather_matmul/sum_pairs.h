// The sum over equal ids of the rows of an array: the gradient of taking rows.
#pragma once

#include "common/primitive.h"

namespace mlx_anvil {

// x [*ids.shape, ...] gives [count, ...]: element i is the sum, in the order of the pairs and in
// float32, of those with id i. Ids are as in problem.h.
mx::array apply_sum_pairs(mx::array x, mx::array ids, int count, mx::Stream s);

}  // namespace mlx_anvil

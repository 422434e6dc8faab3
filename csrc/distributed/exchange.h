// An exchange with the neighbours as a graph node, with derivatives.
#pragma once

#include "common/primitive.h"
#include "distributed/neighbours.h"

namespace mlx_anvil {

// Sends `arrays` to the next rank and returns those of the rank before, of equal shapes and dtypes;
// the other way round if `step` is -1. Each rank has to build its exchanges in the same order, and
// each has to depend on the one before.
//
// An exchange with `after` depends on these arrays too. MLX then evaluates no further until all
// that it has begun on `computes` is done: it allocates memory ahead of the computation, which
// would be memory for the keys of all ranks.
//
//   y[rank] = x[rank - step]        dx[rank] = dy[rank + step]
Arrays exchange_with_neighbours(
    const Arrays& arrays, const Arrays& after, const Group& group, int step, mx::Stream computes);

// Returns `arrays`, which then wait for `before` too. MLX's mx::depends has no forward-mode
// derivative.
Arrays ordered(const Arrays& arrays, const Arrays& before, mx::Stream stream);

}  // namespace mlx_anvil

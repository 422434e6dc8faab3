// Converts the arrays of a call to kernel arguments.
#pragma once

#include "common/primitive.h"
#include "metal/norm/params.h"

namespace mlx_anvil {

// Makes arrays with more axes than a kernel supports dense, which leaves one axis of rows.
Arrays limit_rank(Arrays arrays, mx::Stream stream);

NormRowParams norm_rows_of(const mx::array& x);

}  // namespace mlx_anvil

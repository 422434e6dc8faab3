// From the arrays of a call to what its kernels are given.
#pragma once

#include <initializer_list>

#include "common/primitive.h"
#include "metal/norm/params.h"

namespace mlx_anvil {

// Arrays with more axes than a kernel walks are made dense: then they have one axis of rows.
Arrays limit_rank(Arrays arrays, mx::Stream stream);

NormRowParams norm_rows_of(const mx::array& x);

// Gives a dense output its memory: that of the first of `donors` that nobody else holds, or new.
// Kernels read an element of every operand before they write it, and no other thread reads it.
// Says whether it is new.
bool allocate_rows(mx::array& out,
                   std::initializer_list<const mx::array*> donors,
                   const mx::Stream& stream);

}  // namespace mlx_anvil

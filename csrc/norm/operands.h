// Converts the arrays of a call to kernel arguments.
#pragma once

#include <initializer_list>

#include "common/primitive.h"
#include "metal/norm/params.h"

namespace mlx_anvil {

// Makes arrays with more axes than a kernel supports dense, which leaves one axis of rows.
Arrays limit_rank(Arrays arrays, mx::Stream stream);

NormRowParams norm_rows_of(const mx::array& x);

// Allocates a dense output, reusing the memory of the first donatable array in `donors`. That is
// safe: a thread reads an element of every operand before it writes it, and no other thread reads
// it. Returns true if the memory is new.
bool allocate_rows(mx::array& out,
                   std::initializer_list<const mx::array*> donors,
                   const mx::Stream& stream);

}  // namespace mlx_anvil

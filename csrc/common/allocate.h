// Allocation of outputs and scratch memory. Every primitive calls allocate() or allocate_dense().
#pragma once

#include <initializer_list>
#include <vector>

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

// Allocates memory for an output through MLX's allocator. Large CPU blocks request huge pages:
// touching fresh memory 4 KiB at a time costs more than most of our kernels. On CUDA the memory is
// device memory, allocated in stream order.
mx::allocator::Data allocate(size_t bytes, const mx::Stream& stream);

// Gives `out` dense memory. For CPU kernels it starts at a cache line. MLX's heap blocks start
// after a header, so every vector would straddle two lines and streaming stores would be
// impossible.
void allocate_dense(mx::array& out, const mx::Stream& stream);

// The same for each of `outputs`.
void allocate_dense(std::vector<mx::array>& outputs, const mx::Stream& stream);

// Gives `out` the memory of the first donatable dense array in `donors` that fits, else
// allocate_dense(). Elements of a donor must be read before `out` is written there. Returns true if
// the memory is new.
bool allocate_or_reuse(mx::array& out,
                       std::initializer_list<const mx::array*> donors,
                       const mx::Stream& stream);

}  // namespace mlx_anvil

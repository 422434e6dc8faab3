#pragma once

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

// Memory for an output, from MLX's allocator. Large CPU blocks ask the kernel for huge pages: the
// first touch of fresh memory costs more than most of our kernels when it is taken 4 KiB at a time.
// On CUDA it is the device's own memory, in the order of the stream's work.
mx::allocator::Data allocate(size_t bytes, const mx::Stream& stream);

// Gives `out` dense memory of its own, for CPU kernels from the start of a cache line. MLX's heap
// blocks start behind a header, so that no vector would be in one line, and none could be written
// past the cache.
void allocate_dense(mx::array& out, const mx::Stream& stream);

}  // namespace mlx_anvil

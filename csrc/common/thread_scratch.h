// Scratch memory of the CPU kernels, used by the CPU drivers.
#pragma once

#include <cstdint>

namespace mlx_anvil {

// Returns page-aligned memory of this thread, reused by its next call. The contents are undefined.
void* thread_scratch(int64_t bytes);

}  // namespace mlx_anvil

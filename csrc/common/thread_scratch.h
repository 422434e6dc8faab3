#pragma once

#include <cstdint>

namespace mlx_anvil {

// Memory of this thread, from a page boundary on, kept for its next call; contents undefined.
void* thread_scratch(int64_t bytes);

}  // namespace mlx_anvil

// Moves arrays to huge pages, so that reading all of them misses the TLB less often.
#pragma once

#include <cstdint>
#include <vector>

#include "mlx/mlx.h"

namespace mlx_anvil {

// Moves the memory of evaluated arrays to huge pages, in place. Returns the bytes of the arrays
// that are in huge pages then: 0 where the system has none, or MLX has a GPU.
int64_t use_huge_pages(const std::vector<mlx::core::array>& arrays);

}  // namespace mlx_anvil

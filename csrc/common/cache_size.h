#pragma once

#include <cstdint>

namespace mlx_anvil {

// Bytes of the largest cache that this processor shares with some others, or 32 MiB where nobody
// says.
int64_t last_level_cache_bytes();

}  // namespace mlx_anvil

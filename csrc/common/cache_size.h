#pragma once

#include <cstdint>

namespace mlx_anvil {

// Bytes of the largest cache that this processor shares with some others: 32 MiB at most, and where
// nobody says.
int64_t last_level_cache_bytes();

// Whether a call that reads and writes so many bytes in all should write past the cache. From a
// quarter of it on, that and one reading of the output from memory take less time than writing
// through the cache, which reads what it is about to overwrite.
bool streams_outputs(int64_t bytes);

}  // namespace mlx_anvil

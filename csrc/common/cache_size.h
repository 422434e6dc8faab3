// Cache sizes, and the decision to use streaming stores.
#pragma once

#include <cstdint>

namespace mlx_anvil {

// Size in bytes of the largest cache that a core can use, at most 32 MiB. Returns 32 MiB if the
// system does not report one.
int64_t last_level_cache_bytes();

// Returns true if a call that reads and writes `bytes` in total should use streaming stores. From a
// quarter of the last-level cache on they are faster, although the next op must read the output
// from memory: an ordinary store first reads the line that it overwrites.
bool streams_outputs(int64_t bytes);

}  // namespace mlx_anvil

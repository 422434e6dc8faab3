// rope_and_cache as a graph node.
#pragma once

#include "rope/primitive.h"

namespace mlx_anvil {

// The arrays of rope_and_cache: [batch, heads, length, head_dim] and two caches
// [batch, kv_heads, capacity, head_dim]. `heads` is q, k and v, or one array with the heads of all.
struct RopeCacheArrays {
  Arrays heads;
  mx::array k_cache, v_cache;
};

// Returns the rotated queries and both caches. The row at position p becomes row p of a cache, if
// the cache has one.
Arrays apply_rope_and_cache(const RopeConfig& config,
                            RopeCacheArrays arrays,
                            RopePositions positions,
                            mx::Stream s);

}  // namespace mlx_anvil

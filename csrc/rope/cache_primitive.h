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

// The same for one token on the CPU. The elements of q are [batch, heads, head_dim], and those of k
// and v [batch, kv_heads, head_dim], in any shape. Also returns the first `rows` rows of both
// caches.
Arrays apply_rope_and_cache_of_token(const RopeConfig& config,
                                     RopeCacheArrays arrays,
                                     int heads,
                                     int rows,
                                     RopePositions positions,
                                     mx::Stream s);

}  // namespace mlx_anvil

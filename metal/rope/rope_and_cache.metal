// rope_and_cache: rotates queries and keys as rope_qk does, and writes the keys, and values as they
// are, into caches [batch, kv_heads, capacity, head_dim]: the row at position p becomes row p, if
// the cache has one.
//
// Kernels: rope_and_cache_<dtype>.
// Grid: x covers the `rotating` threads (pack of columns, position and chunk of heads, counted over
// queries, keys and values), then the `copying` threads, if a cache is not written in place; z
// covers batch rows and may be smaller than the batch. Threadgroup: 256 x 1 x 1.
//
// Bindings: q, k, v, k_cache, v_cache, offset, freqs or turns, q_out, k_cache_out, v_cache_out,
// params. q, k and v may be one array, and a cache_out its cache.
// Function constants: as in rope.metal; 4 is false.
//
//   rotating: as in rope.metal; packs of values are stored as they are loaded
//   copying:  for each cache that is copied, for packs of rows without a token: copy
#include "metal/common/kernel.h"
#include "metal/rope/cache.h"

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void rope_and_cache(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* v [[buffer(2)]],
    const device T* k_cache [[buffer(3)]],
    const device T* v_cache [[buffer(4)]],
    const device int* offset [[buffer(5)]],
    const device ulong* turns [[buffer(6)]],
    device T* q_out [[buffer(7)]],
    device T* k_cache_out [[buffer(8)]],
    device T* v_cache_out [[buffer(9)]],
    constant RopeCacheParams& params [[buffer(10)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint3 thread_in_group [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  const RopeTensor<T> none = {q, q_out, params.rope.strides[0], params.rope.heads[0]};
  const CacheOperands<T> operands = {
      q,
      k,
      v,
      {k_cache, v_cache},
      q_out,
      {k_cache_out, v_cache_out},
      {{none, none}, offset, reinterpret_cast<const device float*>(turns), turns}};
  rotate_and_write(operands, params, group, groups, thread_in_group.x, threads.x);
}

// ---- kernels

#define INSTANTIATE(dtype, T) MLX_ANVIL_KERNEL("rope_and_cache_" #dtype, rope_and_cache<T>)

INSTANTIATE(float32, float)
INSTANTIATE(float16, half)
INSTANTIATE(bfloat16, bfloat)

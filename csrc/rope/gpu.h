// The launches of rope's Metal kernels, called by the primitives.
#pragma once

#include "metal/rope/params.h"
#include "rope/primitive.h"

namespace mlx_anvil {

// The parameters that do not depend on the number of tensors, of which `x` is the first.
RopeParams rope_params(const RopeConfig& config,
                       const mx::array& x,
                       const RopePositions& positions);

// The turns per position of each pair, in memory that the GPU has read before if possible. Keep a
// donatable result until the kernel is done.
mx::array rope_turns_array(const RopeConfig& config, const mx::Device& device);

// `outputs` must be allocated.
void rope_gpu(const RopeConfig& config,
              const Arrays& tensors,
              const RopePositions& positions,
              Arrays& outputs,
              const mx::Stream& stream);

// The operands of rope_and_cache. q, k and v may be parts of one array.
struct RopeCacheOperands {
  struct Heads {
    const mx::array* array;
    int64_t count;
    int64_t first;  // element
  };
  Heads heads[3];
  const mx::array *k_cache, *v_cache;
};

// `outputs` are q and the caches, which are copied first unless they share the operands' memory.
void rope_and_cache_gpu(const RopeConfig& config,
                        const RopeCacheOperands& operands,
                        const RopePositions& positions,
                        Arrays& outputs,
                        const mx::Stream& stream);

}  // namespace mlx_anvil

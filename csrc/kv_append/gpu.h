// The launches of kv_append's Metal kernels, called by the primitive.
#pragma once

#include "kv_append/primitive.h"

namespace mlx_anvil {

// `caches` may share the memory of `outputs`; those that do not are copied first.
void kv_append_gpu(const KvAppendConfig& config,
                   const KvAppendArrays& arrays,
                   Arrays& outputs,
                   const mx::Stream& stream);

}  // namespace mlx_anvil

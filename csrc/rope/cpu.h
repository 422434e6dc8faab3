// rope on the CPU: runs on the calling thread and those of `parallel_for`, until done.
#pragma once

#include "mlx/mlx.h"
#include "rope/frequencies.h"

namespace mlx_anvil {

namespace mx = mlx::core;

struct RopeTensor {
  const void* in;
  void* out;  // dense
  int64_t heads;
  int64_t strides[4];  // of the input: batch, head, position, column; in elements
};

struct RopeArgs {
  mx::Dtype dtype = mx::float32;
  RopeTensor tensors[2];
  int count = 1;  // of tensors
  int64_t batch, length, head_dim, pairs;
  const void* offset;
  bool offset_is_wide;  // int64, else int32
  bool offset_per_batch;
  const float* freqs;  // null: those of base
  RopeFrequencies frequencies;
  bool traditional;
  bool inverse;
  bool stream;  // write past the cache
};

void rope_cpu(const RopeArgs& args);

}  // namespace mlx_anvil

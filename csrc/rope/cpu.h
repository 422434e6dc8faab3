// rope on the CPU, called from the primitive's stream task. Returns when the work is done; uses the
// calling thread and those of parallel_for().
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
  int count = 1;  // number of tensors
  int64_t batch, length, head_dim, pairs;
  const void* offset;
  bool offset_is_wide;  // int64, otherwise int32
  bool offset_per_batch;
  const float* freqs;  // null: derived from base
  RopeFrequencies frequencies;
  bool traditional;
  bool inverse;
  bool stream;  // use streaming stores
};

void rope_cpu(const RopeArgs& args);

}  // namespace mlx_anvil

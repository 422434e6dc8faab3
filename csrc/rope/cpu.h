// rope on the CPU, called from the primitives' stream tasks. Returns when the work is done; uses
// the calling thread and those of parallel_for().
#pragma once

#include "mlx/mlx.h"
#include "rope/primitive.h"

namespace mlx_anvil {

namespace mx = mlx::core;

struct RopeTensor {
  const void* in;
  void* out;
  int64_t heads;
  int64_t strides[4];      // of the input: batch, head, position, column; in elements
  int64_t out_rows;        // per head of the dense output
  bool at_offset = false;  // rows go to their position in a cache, if it has one; else to row 0 on
  bool rotates = true;     // otherwise rows are copied
};

// A block of memory to copy first.
struct RopeCopy {
  const void* from;
  void* to;
  int64_t bytes;
};

struct RopeArgs {
  mx::Dtype dtype = mx::float32;
  RopeTensor tensors[3];
  int count = 1;  // number of tensors
  RopeCopy copies[2] = {};
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

// The arguments that all tensors share, without the tensors. `x` is one of them.
RopeArgs cpu_args(const RopeConfig& config, const RopePositions& positions, const mx::array& x);

void rope_cpu(const RopeArgs& args);

}  // namespace mlx_anvil

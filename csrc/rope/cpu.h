// rope on the CPU, called from the primitives' stream tasks. Returns when the work is done; uses
// the calling thread and those of parallel_for().
#pragma once

#include <vector>

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

// Frequencies in the kernels' order, padded to whole blocks.
struct PaddedFrequencies {
  std::vector<uint64_t> turns;
  std::vector<float> defects;

  // `freqs` replaces `frequencies.base` unless it is null.
  PaddedFrequencies(const RopeConfig& config, const float* freqs, mx::Dtype dtype);

  int64_t padded() const { return static_cast<int64_t>(turns.size()); }
};

// The arguments that all tensors share, without the tensors. `x` is one of them.
RopeArgs cpu_args(const RopeConfig& config, const RopePositions& positions, const mx::array& x);

void rope_cpu(const RopeArgs& args);

// Copies a block of memory on several threads.
void copy_on_cpu(const RopeCopy& copy);

}  // namespace mlx_anvil

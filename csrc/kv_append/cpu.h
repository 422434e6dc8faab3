// kv_append on the CPU. Returns when the work is done; uses the calling thread and those of
// parallel_for().
#pragma once

#include <vector>

#include "kv_append/primitive.h"
#include "rope/cpu.h"

namespace mlx_anvil {

// Rows of one array of tokens, and the caches that they go to.
struct KvAppendTensor {
  const void* in;
  int64_t strides[4];  // batch, head, token, column; in elements
  int64_t columns;
  int64_t itemsize;
  int32_t bits;  // 0: the row is copied to out[0], else quantized to all three
  bool rotates;
  void* out[3];  // dense
};

struct KvAppendArgs {
  mx::Dtype dtype = mx::float32;  // of rows that are rotated or quantized
  std::vector<KvAppendTensor> tensors;
  std::vector<RopeCopy> copies;  // caches to copy first
  const int64_t* rows;
  const int64_t* positions;
  int64_t batch, length, heads, pages, page_size, row_step, position_step;
  int32_t group;
  bool distinct;
  RopeConfig rope;
  const float* freqs;
};

void kv_append_cpu(const KvAppendArgs& args);

}  // namespace mlx_anvil

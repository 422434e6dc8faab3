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

// The rows or positions of tokens, from the array of KvAppendArrays.
struct NumbersOfTokens {
  const int64_t* numbers;
  int64_t batch_step;
  bool counts;

  static NumbersOfTokens of(const mx::array& x) {
    return {x.data<int64_t>(), x.shape(0) > 1 ? x.shape(1) : 0, x.shape(1) == 1};
  }
  uint64_t at(int64_t batch, int64_t token) const {
    const int64_t* const own = numbers + batch * batch_step;
    const auto t = static_cast<uint64_t>(token);
    return counts ? static_cast<uint64_t>(*own) + t : static_cast<uint64_t>(own[token]);
  }
};

struct KvAppendArgs {
  mx::Dtype dtype = mx::float32;  // of rows that are rotated or quantized
  std::vector<KvAppendTensor> tensors;
  std::vector<RopeCopy> copies;  // caches to copy first
  NumbersOfTokens rows, positions;
  int64_t batch, length, heads, pages, page_size;
  int32_t group;
  bool distinct;
  RopeConfig rope;
  const float* freqs;
};

void kv_append_cpu(const KvAppendArgs& args);

}  // namespace mlx_anvil

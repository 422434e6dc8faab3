// Sizes and arguments of the CPU drivers and kernels of moe_permute and moe_combine. Plain data
// (see common/isa.h).
//
// A batch (an element of axes that vmap added) has `tokens` tokens, each with `chosen` experts:
// tokens * chosen pairs, and as many places. Arrays are dense.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace mlx_anvil {

struct MoeSizes {
  int64_t batches = 0;
  int64_t tokens = 0;
  int64_t chosen = 0;
  int64_t columns = 0;

  int64_t pairs() const { return tokens * chosen; }
  int64_t all_pairs() const { return batches * pairs(); }
};

// The place of a pair within its batch, of `pairs` at least 1. No value reads other memory.
[[gnu::always_inline]] inline int64_t moe_place(int32_t place, int64_t pairs) {
  return place < 0 ? 0 : place < pairs ? place : pairs - 1;
}

struct MoeSortArgs {
  MoeSizes sizes;
  int64_t experts;
  const void* ids;  // 32 bits each
  bool ids_are_signed;
  int32_t *offsets, *order, *inverse, *sorted;
};

// out[inverse[t, j]] = x[t]
struct MoeSpreadArgs {
  MoeSizes sizes;
  int64_t row_bytes;
  const void* x;
  const int32_t* inverse;
  void* out;
  bool stream_outputs;
};

// One number for each token or pair.
struct MoeFactors {
  const void* data;  // may be null
  bool is_float32;   // otherwise of the dtype of the rows
};

struct MoeCombineArgs {
  MoeSizes sizes;
  const void* y;
  const int32_t* inverse;
  MoeFactors weights;
  const void* residual;  // may be null
  const void* shared;    // may be null
  MoeFactors gate;       // null if `shared` is added as it is
  void* out;
  bool stream_outputs;
};

struct MoeBackwardArgs {
  MoeSizes sizes;
  const void* d_out;
  const void* y;
  const int32_t* inverse;
  MoeFactors weights;
  const void* shared;
  MoeFactors gate;
  void* d_y;
  void* d_weights;  // null without weights
  void* d_shared;   // null without a gate
  void* d_gate;     // null without a gate
  bool stream_outputs;
};

}  // namespace mlx_anvil

// Parameters of the softmax_topk kernels, shared by the host (C++) and the kernels (MSL).
//
// Bindings. Forward:  logits bias | weights indices | params
//           backward: logits indices d_weights | d_logits | params
// All arrays are dense, with rows of `experts` or `chosen` elements. The bias is float32, and any
// other array if there is none.
#pragma once

#ifndef __METAL__
#include <cstdint>
namespace mlx_anvil {
#endif

struct SoftmaxTopkParams {
  uint32_t rows;
  uint32_t experts;
  uint32_t chosen;
  uint32_t groups;  // of equal size; at most 32 if fewer are kept
  uint32_t kept_groups;
  uint32_t group_size;
  uint32_t groups_by_max;  // otherwise by the sum of their two best
  uint32_t rows_per_bias;
  int32_t masked_key;  // of experts whose group is not kept
  float scale;         // of the weights
};

static_assert(sizeof(SoftmaxTopkParams) == 4 * 10, "same layout in C++ and MSL");

#ifndef __METAL__
}  // namespace mlx_anvil
#endif

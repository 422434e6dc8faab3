// Parameters of the softmax_topk kernels, shared by the host (C++) and the kernels (MSL).
//
// Bindings. Forward:  logits | weights indices | params
//           backward: logits indices d_weights | d_logits | params
// All arrays are dense, with rows of `experts` or `chosen` elements.
#pragma once

#ifndef __METAL__
#include <cstdint>
namespace mlx_anvil {
#endif

struct SoftmaxTopkParams {
  uint32_t rows;
  uint32_t experts;
  uint32_t chosen;
};

static_assert(sizeof(SoftmaxTopkParams) == 4 * 3, "same layout in C++ and MSL");

#ifndef __METAL__
}  // namespace mlx_anvil
#endif

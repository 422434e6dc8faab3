// Arguments of softmax_topk's CPU kernels, filled by primitive.cpp. Plain data (see isa.h).
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace mlx_anvil {

// Covers all rows. Rows are dense: `experts` logits, `chosen` weights and indices.
struct RouterForwardArgs {
  const void* logits;
  void* weights;
  uint32_t* indices;
  int64_t experts, chosen;
  bool is_sigmoid;      // otherwise softmax
  bool is_normalised;   // the weights of a row sum to 1
  bool in_index_order;  // otherwise by descending weight
};

struct RouterBackwardArgs {
  const void* logits;
  const uint32_t* indices;
  const void* d_weights;
  void* d_logits;
  int64_t experts, chosen;
  bool is_sigmoid;
  bool is_normalised;
};

// `scratch` must hold scratch_bytes().
using RouterForwardKernel = void (*)(const RouterForwardArgs& args,
                                     int64_t begin,
                                     int64_t end,
                                     void* scratch);
using RouterBackwardKernel = void (*)(const RouterBackwardArgs& args,
                                      int64_t begin,
                                      int64_t end,
                                      void* scratch);

struct RouterForwardTable {
  PerDtype<RouterForwardKernel> of;
  int64_t (*scratch_bytes)(int64_t experts, int64_t chosen);
};
struct RouterBackwardTable {
  PerDtype<RouterBackwardKernel> of;
  int64_t (*scratch_bytes)(int64_t experts, int64_t chosen);
};

MLX_ANVIL_DECLARE_KERNELS(RouterForwardTable, router_forward_kernels)
MLX_ANVIL_DECLARE_KERNELS(RouterBackwardTable, router_backward_kernels)

}  // namespace mlx_anvil

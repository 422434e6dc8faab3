// What the host hands to the CPU kernels of softmax_topk. Plain data (see isa.h).
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace mlx_anvil {

// All rows, each dense after the other: `experts` logits, `chosen` weights and indices.
struct RouterForwardArgs {
  const void* logits;
  void* weights;
  uint32_t* indices;
  int64_t experts, chosen;
  bool is_sigmoid;      // otherwise softmax
  bool is_normalised;   // weights of a row sum to 1
  bool in_index_order;  // otherwise the largest weight comes first
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

// `scratch`: of `scratch_bytes`.
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

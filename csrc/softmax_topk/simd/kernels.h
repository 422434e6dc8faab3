// Arguments of softmax_topk's CPU kernels, filled by primitive.cpp. Plain data (see isa.h).
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"
#include "softmax_topk/scoring.h"

namespace mlx_anvil {

// Covers all rows. Rows are dense: `experts` logits, `chosen` weights and indices.
struct RouterForwardArgs {
  const void* logits;
  void* weights;
  uint32_t* indices;
  int64_t experts, chosen;
  RouterScoring scoring;
  bool is_normalised;   // the weights of a row sum to 1
  bool in_index_order;  // otherwise the best first
  bool is_steered;      // has a bias or groups
  float scale;          // of the weights
  const float* bias;    // null if there is none
  int64_t rows_per_bias;
  int64_t groups, kept_groups;  // of equal size; one group if all are kept
  bool groups_by_max;           // otherwise by the sum of their two best
  int32_t masked_key;           // of experts whose group is not kept
};

struct RouterBackwardArgs {
  const void* logits;
  const uint32_t* indices;
  const void* d_weights;
  void* d_logits;
  int64_t experts, chosen;
  RouterScoring scoring;
  bool is_normalised;
  bool is_steered;  // the highest logit may not be among the chosen ones
  float scale;
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

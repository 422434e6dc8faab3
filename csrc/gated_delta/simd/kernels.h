// Arguments of gated_delta's CPU kernels, filled by cpu.cpp and cpu_backward.cpp. Plain data (see
// common/isa.h).
#pragma once

#include "common/dtype.h"
#include "common/integers.h"
#include "common/isa.h"

namespace mlx_anvil {

inline constexpr int64_t kMaxDeltaKeyDim = 256;
inline constexpr int64_t kDeltaKeyDimUnit = 16;  // of which key dims are multiples
inline constexpr int64_t kDeltaChunk = 64;       // steps between states that the backward keeps
inline constexpr int64_t kMostFewSteps = 4;
inline constexpr int64_t kDeltaRows = 4;  // rows of the state that step together

// A value head of a batch row. Steps lie some elements apart, columns are dense.
struct DeltaHead {
  const void *q, *k, *v;  // of the first step
  const void *g, *beta;   // float32, or of the dtype
  const float* skip;      // null: none
  const void* gate;       // null: none
  int64_t q_step, k_step, v_step, g_step, beta_step, skip_step, gate_step;
  bool corrects;
  bool g_is_float32, beta_is_float32;
  bool is_per_channel;  // g has one factor per column of the state, else one for all
  bool normalizes;
  float eps, q_scale;  // of the normalisation
  int64_t key_dim, value_dim;
};

// A state that is kept: that after step `step`.
struct DeltaSaved {
  int64_t step;
  float* state;  // [value_dim, key_dim]
};

struct DeltaSavedGradient {
  int64_t step;
  const float* d_state;  // of the first head
};

// Some rows of a value head, over all steps.
struct DeltaForwardBlock {
  DeltaHead head;
  int64_t steps;          // 1 or more
  int64_t first, count;   // rows
  const float* state_in;  // [value_dim, key_dim]; null: zeros. May be state_out.
  float* state_out;       // null: not wanted
  void* y;                // of the first step, dense columns; null: not wanted
  int64_t y_step;
  const DeltaSaved* saved;  // in the order of their steps
  int64_t saved_count;
};

// Some adjacent steps of all value heads of a key head.
struct DeltaBackwardChunk {
  DeltaHead head;  // the first value head, at the first step of the chunk
  int64_t heads;
  int64_t v_head, g_head, beta_head, skip_head, gate_head;  // elements to the next value head
  int64_t steps;                                            // at most kDeltaChunk
  const void* d_y;
  int64_t d_y_step, d_y_head;
  const float* states;  // before the first step; null: zeros
  int64_t state_head;   // elements to that of the next head
  float* d_states;      // [heads, value_dim, key_dim]: of the chunk's end, then of its start
  const DeltaSavedGradient* d_saved;  // from the last step on
  int64_t d_saved_count, d_saved_head;
  // Dense; d_q_step and so on are elements from step to step. d_skip is as d_beta, d_gate as d_v.
  void *d_q, *d_k, *d_v, *d_gate;
  float *d_g, *d_beta, *d_skip;
  int64_t d_q_step, d_k_step, d_v_step, d_g_step, d_beta_step;
  bool d_keys_are_parts;  // d_q and d_k are float32, and sums over these heads only
  float* scratch;         // delta_backward_scratch() numbers, at a cache line
};

[[gnu::always_inline]] constexpr int64_t delta_backward_scratch(int64_t key_dim,
                                                                int64_t value_dim) {
  constexpr int64_t kMostLanes = 16;
  const int64_t per_step = 7 * key_dim + 4 * round_up(value_dim, kMostLanes) +
                           kDeltaRows * (key_dim + 1) + kMostLanes + 8;
  return kDeltaChunk * per_step + 2 * kDeltaRows * key_dim;
}

struct DeltaForwardKernels {
  void (*few_steps)(const DeltaForwardBlock& block);  // kMostFewSteps or less; wants all outputs
  void (*many_steps)(const DeltaForwardBlock& block);
  int64_t block_rows;  // of many_steps()
};

using DeltaBackwardKernel = void (*)(const DeltaBackwardChunk& chunk);

MLX_ANVIL_DECLARE_KERNELS(PerDtype<DeltaForwardKernels>, gated_delta_forward_kernels)
MLX_ANVIL_DECLARE_KERNELS(PerDtype<DeltaBackwardKernel>, gated_delta_backward_kernels)

}  // namespace mlx_anvil

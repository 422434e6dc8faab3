// The recurrence of gated_delta and ssd_scan as plain data. Per step and value head:
//
//   S = g S;  S = S + beta (v - S k) k^T;  y = S q             gated_delta
//   S = g S;  S = S + beta v k^T;          y = S q + skip v    ssd_scan, which does not correct
//   y = y silu(gate)                                           if there is a gate
//
// q and k are normalised first, if wanted: k / |k| and q_scale q / |q|.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace mlx_anvil {

struct DeltaSizes {
  int64_t batch = 0, length = 0, key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
  int64_t positions = 0;        // states that are returned besides the last
  bool is_per_channel = false;  // g

  int64_t group() const { return value_heads / key_heads; }
  int64_t state() const { return value_dim * key_dim; }
};

// Axes: batch, step, head, column. Rows are dense.
struct DeltaView {
  const void* data = nullptr;
  int64_t strides[4] = {};
};

struct DeltaArgs {
  DeltaSizes sizes;
  KernelDtype dtype = KernelDtype::kFloat32;  // of q, k and v
  DeltaView q, k, v, g, beta;
  DeltaView skip;  // float32; null: none
  DeltaView gate;  // of the dtype; null: none
  bool corrects = true;
  bool g_is_float32 = true, beta_is_float32 = true;  // else of the dtype
  const float* state = nullptr;                      // dense; null: zeros
  const int32_t* lengths = nullptr;                  // [batch]; null: all steps
  const int32_t* positions = nullptr;                // dense rows
  int64_t positions_step = 0;                        // to those of the next batch row
  bool normalizes = false;
  float eps = 0, q_scale = 1;
};

// Outputs are dense.
struct DeltaForwardArgs : DeltaArgs {
  void* y = nullptr;
  float* state_out = nullptr;  // may be `state`
  float* states = nullptr;
};

struct DeltaBackwardArgs : DeltaArgs {
  DeltaView d_y;
  const float *d_state_out = nullptr, *d_states = nullptr;
  void *d_q = nullptr, *d_k = nullptr, *d_v = nullptr;
  float *d_g = nullptr, *d_beta = nullptr;
  float* d_skip = nullptr;   // [batch, step, head], if there is a skip
  void* d_gate = nullptr;    // if there is a gate
  float* d_state = nullptr;  // null: not wanted
};

}  // namespace mlx_anvil

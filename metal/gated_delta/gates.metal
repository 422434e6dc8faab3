// gated_delta_gates: decays g [rows, heads, channels] and rates beta [rows, heads] in float32.
//   g = exp(-exp(A_log) softplus(a + dt_bias)), or exp(bound sigmoid(exp(A_log) (a + dt_bias)))
//   beta = scale sigmoid(b)
//
// Kernels: gated_delta_gates_<dtype of a and b>.
// Grid: linear_grid of the numbers of g. Threadgroup: 256 x 1 x 1.
//
// Bindings: a, b, A_log, dt_bias, g, beta, params
// Function constants: 0 to 2 in gates.h: A_log and dt_bias are float32, else of the dtype; g has a
// bound.
// Everything is dense; no alignment beyond the dtype's is assumed.
//
//   each thread: one number of g; those of a head's first channel also beta
#include "metal/common/kernel.h"
#include "metal/gated_delta/gates.h"

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void gated_delta_gates(
    const device T* a [[buffer(0)]],
    const device T* b [[buffer(1)]],
    const device T* a_log [[buffer(2)]],
    const device T* dt_bias [[buffer(3)]],
    device float* g [[buffer(4)]],
    device float* beta [[buffer(5)]],
    constant GatedDeltaGatesParams& params [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint3 thread_in_group [[thread_position_in_threadgroup]]) {
  const int columns = params.heads * params.channels;
  const long place = (long(group.y) * groups.x + group.x) * 256 + thread_in_group.x;
  if (place >= params.rows * columns) {
    return;
  }
  const long row = place / columns;
  const int column = int(place - row * columns), head = column / params.channels;
  const GateColumn own = gate_column(a_log, dt_bias, head, column);
  g[place] = decay_of(float(a[place]) + own.bias, own.speed, params).g;
  if (column == head * params.channels) {
    const long at = row * params.heads + head;
    beta[at] = params.rate_scale * sigmoid_or_nan(float(b[at])).value;
  }
}

// ---- kernels

MLX_ANVIL_KERNEL("gated_delta_gates_float32", gated_delta_gates<float>)
MLX_ANVIL_KERNEL("gated_delta_gates_float16", gated_delta_gates<half>)
MLX_ANVIL_KERNEL("gated_delta_gates_bfloat16", gated_delta_gates<bfloat>)

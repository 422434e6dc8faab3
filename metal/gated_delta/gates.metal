// gated_delta_gates: decays g [rows, heads, channels] and rates beta [rows, heads] in float32.
//   g = exp(-exp(A_log) softplus(a + dt_bias)), or exp(bound sigmoid(exp(A_log) (a + dt_bias)))
//   beta = scale sigmoid(b)
//
// Kernels: gated_delta_gates_<dtype of a and b>.
// Grid: linear_grid of the numbers of g. Threadgroup: 256 x 1 x 1.
//
// Bindings: a, b, A_log, dt_bias, g, beta, params
// Function constants: 0 and 1: A_log and dt_bias are float32, else of the dtype; 2: g has a bound.
// Everything is dense; no alignment beyond the dtype's is assumed.
//
//   each thread: one number of g; those of a head's first channel also beta
#include "metal/common/activation.h"
#include "metal/common/kernel.h"
#include "metal/gated_delta/load_gate.h"
#include "metal/gated_delta/params.h"

constant bool log_is_float32 [[function_constant(0)]];
constant bool bias_is_float32 [[function_constant(1)]];
constant bool is_bounded [[function_constant(2)]];

// Metal's functions may take NaN for a number.
METAL_FUNC float sigmoid_or_nan(float x) {
  return metal::isnan(x) ? x : sigmoid(x).value;
}

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
  const float speed = metal::precise::exp(load_gate(a_log, log_is_float32, head));
  const float x = float(a[place]) + load_gate(dt_bias, bias_is_float32, column);
  const float exponent =
      is_bounded ? params.lower_bound * sigmoid_or_nan(speed * x) : -(speed * softplus(x));
  g[place] = metal::precise::exp(exponent);
  if (column == head * params.channels) {
    const long at = row * params.heads + head;
    beta[at] = params.rate_scale * sigmoid_or_nan(float(b[at]));
  }
}

// ---- kernels

MLX_ANVIL_KERNEL("gated_delta_gates_float32", gated_delta_gates<float>)
MLX_ANVIL_KERNEL("gated_delta_gates_float16", gated_delta_gates<half>)
MLX_ANVIL_KERNEL("gated_delta_gates_bfloat16", gated_delta_gates<bfloat>)

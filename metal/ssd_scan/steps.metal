// ssd_scan: step sizes and decays [rows, heads] in float32, which the kernels of gated_delta take.
//   step = dt + bias; step = softplus(step) if wanted; step = step clipped; decay = exp(step A)
//
// Kernels: ssd_scan_steps_<dtype of dt>.
// Grid: linear_grid of the numbers of dt. Threadgroup: 256 x 1 x 1.
//
// Bindings: dt, A, bias, lengths, decays, steps, params
// Function constants: 0: there is a bias; 1: softplus; 2: there are lengths, past which dt counts
// as 0. Rows of dt are dense, and so is everything else; no alignment beyond the dtype's is
// assumed.
//
//   each thread: one number of each result
#include "metal/common/activation.h"
#include "metal/common/kernel.h"
#include "metal/ssd_scan/params.h"

constant bool has_bias [[function_constant(0)]];
constant bool has_softplus [[function_constant(1)]];
constant bool has_lengths [[function_constant(2)]];

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void ssd_scan_steps(
    const device T* dt [[buffer(0)]],
    const device float* a [[buffer(1)]],
    const device float* bias [[buffer(2)]],
    const device int* lengths [[buffer(3)]],
    device float* decays [[buffer(4)]],
    device float* steps [[buffer(5)]],
    constant SsdStepsParams& params [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint3 thread_in_group [[thread_position_in_threadgroup]]) {
  const long place = (long(group.y) * groups.x + group.x) * 256 + thread_in_group.x;
  if (place >= params.rows * params.heads) {
    return;
  }
  const long row = place / params.heads;
  const int head = int(place - row * params.heads);
  const int batch = int(row / params.length), t = int(row - long(batch) * params.length);
  float x = 0.0f;
  if (!has_lengths || t < lengths[batch]) {
    x = float(dt[batch * params.dt_strides[0] + t * params.dt_strides[1] + head]);
  }
  x += has_bias ? bias[head] : 0.0f;
  x = has_softplus ? softplus(x) : x;
  x = x < params.least ? params.least : x;  // NaN stays
  x = x > params.most ? params.most : x;
  steps[place] = x;
  decays[place] = metal::precise::exp(x * a[head]);
}

// ---- kernels

MLX_ANVIL_KERNEL("ssd_scan_steps_float32", ssd_scan_steps<float>)
MLX_ANVIL_KERNEL("ssd_scan_steps_float16", ssd_scan_steps<half>)
MLX_ANVIL_KERNEL("ssd_scan_steps_bfloat16", ssd_scan_steps<bfloat>)

// ssd_scan: step sizes and decays [rows, heads] in float32, which the kernels of gated_delta take.
//   step = dt + bias; step = softplus(step) if wanted; step = step clipped; decay = exp(step A)
//
// backward: the gradient of dt + bias, and what sums up to that of A, both [rows, heads].
//
// Kernels: ssd_scan_steps_<dtype of dt>, ssd_scan_steps_backward_<dtype of dt>.
// Grid: linear_grid of the numbers of dt. Threadgroup: 256 x 1 x 1.
//
// Bindings: dt, A, bias, lengths, decays, steps, params; backward: dt, A, bias, lengths, d_decays,
// d_steps, d_dt, d_a, params
// Function constants: 0: there is a bias; 1: softplus; 2: there are lengths, past which dt counts
// as 0. Rows of dt, A and bias are dense, and so is everything else; no alignment beyond the
// dtype's is assumed.
//
//   each thread: one number of each result
#include "metal/common/activation.h"
#include "metal/common/kernel.h"
#include "metal/ssd_scan/params.h"

constant bool has_bias [[function_constant(0)]];
constant bool has_softplus [[function_constant(1)]];
constant bool has_lengths [[function_constant(2)]];

// The step size of one head at one step, and what it is made of.
struct Step {
  float x;      // dt + bias
  float given;  // before the clip
  float size;
  float rate;
  float decay;
  bool counts;
};

template <typename T>
METAL_FUNC Step step_at(const device T* dt,
                        const device float* a,
                        const device float* bias,
                        const device int* lengths,
                        constant SsdStepsParams& params,
                        long place) {
  const long row = place / params.heads;
  const int head = int(place - row * params.heads);
  const int batch = int(row / params.length), t = int(row - long(batch) * params.length);
  Step step;
  step.counts = !has_lengths || t < lengths[batch];
  step.x = 0.0f;
  if (step.counts) {
    step.x = float(dt[batch * params.dt_strides[0] + t * params.dt_strides[1] + head]);
  }
  step.x += has_bias ? bias[batch * params.bias_stride + head] : 0.0f;
  step.given = has_softplus ? softplus(step.x) : step.x;
  step.size = step.given < params.least ? params.least : step.given;  // NaN stays
  step.size = step.size > params.most ? params.most : step.size;
  step.rate = a[batch * params.a_stride + head];
  step.decay = metal::precise::exp(step.size * step.rate);
  return step;
}

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
  const Step step = step_at(dt, a, bias, lengths, params, place);
  steps[place] = step.size;
  decays[place] = step.decay;
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void ssd_scan_steps_backward(
    const device T* dt [[buffer(0)]],
    const device float* a [[buffer(1)]],
    const device float* bias [[buffer(2)]],
    const device int* lengths [[buffer(3)]],
    const device float* d_decays [[buffer(4)]],
    const device float* d_steps [[buffer(5)]],
    device float* d_dt [[buffer(6)]],
    device float* d_a [[buffer(7)]],
    constant SsdStepsParams& params [[buffer(8)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint3 thread_in_group [[thread_position_in_threadgroup]]) {
  const long place = (long(group.y) * groups.x + group.x) * 256 + thread_in_group.x;
  if (place >= params.rows * params.heads) {
    return;
  }
  const Step step = step_at(dt, a, bias, lengths, params, place);
  const bool moves = step.counts && step.given > params.least && step.given < params.most;
  const float d_exponent = step.counts ? d_decays[place] * step.decay : 0.0f;
  const float d_size = moves ? d_steps[place] + d_exponent * step.rate : 0.0f;
  d_dt[place] = has_softplus ? d_size * sigmoid(step.x).value : d_size;
  d_a[place] = d_exponent * (step.counts ? step.size : 0.0f);
}

// ---- kernels

#define INSTANTIATE(dtype, T)                                   \
  MLX_ANVIL_KERNEL("ssd_scan_steps_" #dtype, ssd_scan_steps<T>) \
  MLX_ANVIL_KERNEL("ssd_scan_steps_backward_" #dtype, ssd_scan_steps_backward<T>)

INSTANTIATE(float32, float)
INSTANTIATE(float16, half)
INSTANTIATE(bfloat16, bfloat)

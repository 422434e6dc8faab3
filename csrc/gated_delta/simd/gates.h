// What the kernels of gated_delta_gates share: weights of the columns, and decays with their slopes
// by the formulas of metal/gated_delta/gates.h. For kernel files only (see common/simd/simd.h).
#pragma once

#include "common/simd/activations.h"
#include "common/simd/panels.h"
#include "gated_delta/simd/gates_kernels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// The most that A_log counts for: an exponential that is finite, so that 0 times it is 0.
inline constexpr float kMostLog = 88.72f;

// Bounds an argument so that a slope of 0 times it is 0: past it an exponential is 0, and a sigmoid
// 0 or 1.
inline constexpr float kMostArgument = 200.0f;

struct Decays {
  f32v g;
  f32v by_x;    // the derivative by x = a + dt_bias
  f32v by_log;  // the derivative by A_log
};

inline Decays decays_of(const DeltaGatesArgs& args, f32v x, f32v speed) {
  if (args.is_bounded) {
    const f32v u = at_most(at_least(speed * x, -kMostArgument), kMostArgument);
    const Slope s = SigmoidActivation::slope<Accuracy::kFloat32>(u);
    const f32v g = exp(s.value * args.lower_bound);
    const f32v by_u = g * (s.derivative * args.lower_bound);
    return {g, by_u * speed, by_u * u};
  }
  const Softplus s = softplus_with_derivative(x);
  const f32v exponent = at_least(-(speed * s.value), -kMostArgument);
  const f32v g = exp(exponent);
  return {g, -(g * speed) * s.derivative, g * exponent};
}

template <class T>
inline f32v load_weights(const void* from, bool is_float32, int64_t at, int64_t count) {
  return is_float32 ? load_columns(static_cast<const float*>(from), 1, at, count)
                    : load_columns(static_cast<const T*>(from), 1, at, count);
}

// What each column has for all rows, in scratch memory: e^A_log and the bias.
struct GateColumns {
  const float *speeds, *biases;
};

template <class T>
inline GateColumns load_gate_columns(const DeltaGatesArgs& args, float* scratch) {
  const int64_t size = args.row_size(), columns = args.columns();
  float *const speeds = scratch, *const biases = scratch + size;
  for (int64_t h = 0; h < args.heads; h += kLanes) {
    const f32v log = load_weights<T>(args.a_log, args.log_is_float32, h, args.heads);
    store_lanes(speeds + h, exp(at_most(log, kMostLog)));
  }
  // From the last head on, so that none is overwritten before it is read.
  for (int64_t h = args.heads - 1; h >= 0 && args.channels > 1; --h) {
    const float speed = speeds[h];
    for (int64_t c = h * args.channels; c < (h + 1) * args.channels; ++c) {
      speeds[c] = speed;
    }
  }
  for (int64_t c = columns; c < size; ++c) {
    speeds[c] = 0.0f;
  }
  for (int64_t c = 0; c < columns; c += kLanes) {
    store_lanes(biases + c, load_weights<T>(args.dt_bias, args.bias_is_float32, c, columns));
  }
  return {speeds, biases};
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

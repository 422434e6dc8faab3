// The formulas of gated on the CPU, as in metal/gated/gated.h. `limit` is none if it is 0.
#pragma once

#include "common/simd/activations.h"
#include "common/simd/elementwise.h"
#include "gated/simd/kernels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// A derivative does not pass where a clamp holds, nor for NaN. A product with 0 or 1, as in MLX:
// NaN stays NaN.
inline f32v through_gate_clamp(f32v derivative, f32v gate, float limit) {
  return limit > 0.0f ? derivative * (gate < splat(limit) ? splat(1.0f) : f32v{}) : derivative;
}
inline f32v through_up_clamp(f32v derivative, f32v up, float limit) {
  return limit > 0.0f ? derivative * (absolute(up) < splat(limit) ? splat(1.0f) : f32v{})
                      : derivative;
}

// gate, up -> activation(gate) up
template <class Activation>
struct GatedForward {
  static constexpr int kInputs = 2;
  static constexpr int kOutputs = 1;
  template <class T>
  static void apply(const f32v* in, f32v* out, float limit) {
    out[0] = Activation::template value<kAccuracyOf<T>>(clamped_gate(in[0], limit)) *
             clamped_up<Activation>(in[1], limit);
  }
};

// gate, up, dy -> d gate, d up
template <class Activation>
struct GatedBackward {
  static constexpr int kInputs = 3;
  static constexpr int kOutputs = 2;
  template <class T>
  static void apply(const f32v* in, f32v* out, float limit) {
    const f32v gate = in[0], up = in[1], dy = in[2];
    const Slope at = Activation::template slope<kAccuracyOf<T>>(clamped_gate(gate, limit));
    out[0] =
        through_gate_clamp(dy * (clamped_up<Activation>(up, limit) * at.derivative), gate, limit);
    out[1] = through_up_clamp(dy * at.value, up, limit);
  }
};

// gate, up, their tangents -> tangent of the output
template <class Activation>
struct GatedJvp {
  static constexpr int kInputs = 4;
  static constexpr int kOutputs = 1;
  template <class T>
  static void apply(const f32v* in, f32v* out, float limit) {
    const f32v gate = in[0], up = in[1], gate_tangent = in[2], up_tangent = in[3];
    const Slope at = Activation::template slope<kAccuracyOf<T>>(clamped_gate(gate, limit));
    out[0] = through_gate_clamp(gate_tangent, gate, limit) *
                 (clamped_up<Activation>(up, limit) * at.derivative) +
             through_up_clamp(up_tangent, up, limit) * at.value;
  }
};

// The tables of one gate; a file each, so that they compile side by side.
#define MLX_ANVIL_DEFINE_GATE(gate, Activation)                      \
  constinit const ElementwiseKernels gate##_forward_kernels_table =  \
      elementwise_kernels<GatedForward<Activation>>();               \
  constinit const ElementwiseKernels gate##_backward_kernels_table = \
      elementwise_kernels<GatedBackward<Activation>>();              \
  constinit const ElementwiseKernels gate##_jvp_kernels_table =      \
      elementwise_kernels<GatedJvp<Activation>>();

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

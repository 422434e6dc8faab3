// The three formulas of gated, as in csrc/gated/simd/gated.h. `limit` is none if it is 0.
#pragma once

#include "metal/common/activation.h"

// A product with 0 or 1, as in MLX: NaN stays NaN.
METAL_FUNC float through_gate_clamp(float derivative, float gate, float limit) {
  return limit > 0.0f ? derivative * (gate < limit ? 1.0f : 0.0f) : derivative;
}
METAL_FUNC float through_up_clamp(float derivative, float up, float limit) {
  return limit > 0.0f ? derivative * (metal::fabs(up) < limit ? 1.0f : 0.0f) : derivative;
}

// gate, up -> activation(gate) up
template <typename Activation>
struct GatedForward {
  enum { kInputs = 2, kOutputs = 1 };
  static void apply(const thread float* in, thread float* out, float limit) {
    out[0] = Activation::value(clamped_gate(in[0], limit)) * clamped_up<Activation>(in[1], limit);
  }
};

// gate, up, dy -> d_gate, d_up
template <typename Activation>
struct GatedBackward {
  enum { kInputs = 3, kOutputs = 2 };
  static void apply(const thread float* in, thread float* out, float limit) {
    const float gate = in[0], up = in[1], dy = in[2];
    const Slope at = Activation::slope(clamped_gate(gate, limit));
    out[0] =
        through_gate_clamp(dy * (clamped_up<Activation>(up, limit) * at.derivative), gate, limit);
    out[1] = through_up_clamp(dy * at.value, up, limit);
  }
};

// gate, up and their tangents -> tangent of the output
template <typename Activation>
struct GatedJvp {
  enum { kInputs = 4, kOutputs = 1 };
  static void apply(const thread float* in, thread float* out, float limit) {
    const float gate = in[0], up = in[1], gate_tangent = in[2], up_tangent = in[3];
    const Slope at = Activation::slope(clamped_gate(gate, limit));
    out[0] = through_gate_clamp(gate_tangent, gate, limit) *
                 (clamped_up<Activation>(up, limit) * at.derivative) +
             through_up_clamp(up_tangent, up, limit) * at.value;
  }
};

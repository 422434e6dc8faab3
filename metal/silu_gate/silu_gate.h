// The three formulas of silu_gate, as in csrc/silu_gate/simd/silu_gate.cpp.
#pragma once

#include "metal/common/activation.h"

// gate, up -> silu(gate) up
struct SiluGateForward {
  enum { kInputs = 2, kOutputs = 1 };
  static void apply(const thread float* in, thread float* out, float) {
    out[0] = in[0] * fast_sigmoid(in[0]).value * in[1];
  }
};

// gate, up, dy -> d_gate, d_up
struct SiluGateBackward {
  enum { kInputs = 3, kOutputs = 2 };
  static void apply(const thread float* in, thread float* out, float) {
    const float gate = in[0], up = in[1], dy = in[2];
    const Sigmoid s = fast_sigmoid(gate);
    out[0] = dy * (up * silu_derivative(gate, s));
    out[1] = dy * (gate * s.value);
  }
};

// gate, up and their tangents -> tangent of the output
struct SiluGateJvp {
  enum { kInputs = 4, kOutputs = 1 };
  static void apply(const thread float* in, thread float* out, float) {
    const float gate = in[0], up = in[1], gate_tangent = in[2], up_tangent = in[3];
    const Sigmoid s = fast_sigmoid(gate);
    out[0] = gate_tangent * (up * silu_derivative(gate, s)) + up_tangent * (gate * s.value);
  }
};

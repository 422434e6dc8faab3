// A decay of gated_delta_gates and its slopes. csrc/gated_delta/simd/gates.h has the same formulas
// for the CPU.
#pragma once

#include <metal_stdlib>

#include "metal/common/activation.h"
#include "metal/gated_delta/load_gate.h"
#include "metal/gated_delta/params.h"

constant bool log_is_float32 [[function_constant(0)]];
constant bool bias_is_float32 [[function_constant(1)]];
constant bool is_bounded [[function_constant(2)]];

// The most that A_log counts for: an exponential that is finite, so that 0 times it is 0.
METAL_FUNC float most_log() {
  return 88.72f;
}

// Bounds an argument so that a slope of 0 times it is 0: past 200 an exponential is 0, and a
// sigmoid 0 or 1. Comparisons keep NaN.
METAL_FUNC float bounded_argument(float x) {
  x = x < -200.0f ? -200.0f : x;
  return x > 200.0f ? 200.0f : x;
}

// Metal's functions may take NaN for a number.
METAL_FUNC Slope sigmoid_or_nan(float x) {
  const Sigmoid s = sigmoid(x);
  Slope at;
  at.value = metal::isnan(x) ? x : s.value;
  at.derivative = metal::isnan(x) ? x : s.value * s.complement;
  return at;
}

// What a column has for all rows.
struct GateColumn {
  float speed;  // e^A_log
  float bias;
};

template <typename T>
METAL_FUNC GateColumn
gate_column(const device T* a_log, const device T* dt_bias, int head, int column) {
  const float log = load_gate(a_log, log_is_float32, head);
  GateColumn own;
  own.speed = metal::precise::exp(log > most_log() ? most_log() : log);
  own.bias = load_gate(dt_bias, bias_is_float32, column);
  return own;
}

struct Decay {
  float g;
  float by_x;    // the derivative by x = a + dt_bias
  float by_log;  // the derivative by A_log
};

METAL_FUNC Decay decay_of(float x, float speed, constant GatedDeltaGatesParams& params) {
  Decay decay;
  if (is_bounded) {
    const float u = bounded_argument(speed * x);
    const Slope s = sigmoid_or_nan(u);
    decay.g = metal::precise::exp(params.lower_bound * s.value);
    const float by_u = decay.g * (params.lower_bound * s.derivative);
    decay.by_x = by_u * speed;
    decay.by_log = by_u * u;
  } else {
    const float exponent = bounded_argument(-(speed * softplus(x)));
    decay.g = metal::precise::exp(exponent);
    decay.by_x = -(decay.g * speed) * sigmoid(x).value;
    decay.by_log = decay.g * exponent;
  }
  return decay;
}

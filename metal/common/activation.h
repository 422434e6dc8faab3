#pragma once

#include <metal_stdlib>

struct Sigmoid {
  float value;       // s = 1 / (1 + e^-x)
  float complement;  // 1 - s, computed without cancellation
};

// Takes small = e^-|x|, which cannot overflow, and major = 1 / (1 + small).
METAL_FUNC Sigmoid sigmoid_of_parts(float x, float small, float major) {
  const float minor = small * major;
  Sigmoid s;
  s.value = x < 0.0f ? minor : major;
  s.complement = x < 0.0f ? major : minor;
  return s;
}

// Both parts keep full relative accuracy for large positive and large negative x.
METAL_FUNC Sigmoid sigmoid(float x) {
  const float small = metal::precise::exp(-metal::fabs(x));
  return sigmoid_of_parts(x, small, 1.0f / (1.0f + small));
}

// The relative error is at most 5e-6, reached where the parts are smallest. Bandwidth-bound kernels
// on 16-bit data use this one: memory leaves them about 30 instructions per element.
METAL_FUNC Sigmoid fast_sigmoid(float x) {
  const float small = metal::fast::exp2(-M_LOG2E_F * metal::fabs(x));
  return sigmoid_of_parts(x, small, metal::fast::divide(1.0f, 1.0f + small));
}

// d silu(x) / dx = s (1 + x (1 - s)) with s = sigmoid(x)
inline float silu_derivative(float x, Sigmoid s) {
  return s.value * (1.0f + x * s.complement);
}

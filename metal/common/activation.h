#pragma once

#include <metal_stdlib>

struct Sigmoid {
  float value;       // s = 1 / (1 + e^-x)
  float complement;  // 1 - s, without the cancellation of that subtraction
};

// From e^-|x|, which never overflows: both parts keep full relative accuracy at both ends.
inline Sigmoid sigmoid(float x) {
  const float small = metal::precise::exp(-metal::fabs(x));
  const float major = 1.0f / (1.0f + small);
  const float minor = small * major;
  Sigmoid s;
  s.value = x < 0.0f ? minor : major;
  s.complement = x < 0.0f ? major : minor;
  return s;
}

// d silu(x) / dx = s (1 + x (1 - s)) with s = sigmoid(x)
inline float silu_derivative(float x, Sigmoid s) {
  return s.value * (1.0f + x * s.complement);
}

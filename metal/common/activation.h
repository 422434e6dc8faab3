#pragma once

#include <metal_stdlib>

struct Sigmoid {
  float value;       // s = 1 / (1 + e^-x)
  float complement;  // 1 - s, without the cancellation of that subtraction
};

// From e^-|x|, which never overflows: both parts keep their relative accuracy at both ends, 5e-6
// where they are smallest. The fast functions: of 16-bit numbers, memory delivers so many that
// there is time for some 30 instructions for each.
inline Sigmoid sigmoid(float x) {
  const float small = metal::fast::exp2(-M_LOG2E_F * metal::fabs(x));
  const float major = metal::fast::divide(1.0f, 1.0f + small);
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

// Activations of gates and their slopes, for gated, silu_gate, sigmoid_gate and
// quantized_swiglu.
// csrc/common/simd/activations.h has the same formulas for the CPU.
#pragma once

#include <metal_stdlib>

#include "metal/common/activation_kind.h"

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

// ---- activations of gates, with the formulas of csrc/common/simd/activations.h
//
// An activation is a struct with `value` and `slope`; a gate multiplies it by up + up_offset().

struct Slope {
  float value;
  float derivative;
};

struct SiluActivation {
  static float up_offset() { return 0.0f; }
  static float value(float x) { return x * fast_sigmoid(x).value; }
  static Slope slope(float x) {
    const Sigmoid s = fast_sigmoid(x);
    Slope at;
    at.value = x * s.value;
    at.derivative = silu_derivative(x, s);
    return at;
  }
};

// x s and its derivative, with s the sigmoid of a function of x whose derivative is `inner`. The
// bell s (1 - s) comes first: x times `inner` may overflow.
METAL_FUNC Slope slope_of_sigmoid(float x, Sigmoid s, float inner) {
  Slope at;
  at.value = x * s.value;
  at.derivative = s.value + x * (s.value * s.complement) * inner;
  return at;
}

// GPT-OSS: x sigmoid(1.702 x), times up + 1.
struct SwigluOaiActivation {
  static float up_offset() { return 1.0f; }
  static float value(float x) { return x * fast_sigmoid(1.702f * x).value; }
  static Slope slope(float x) { return slope_of_sigmoid(x, fast_sigmoid(1.702f * x), 1.702f); }
};

// x cdf(x) with the normal distribution's cdf. In terms of a = |x| and t = 1 / (1 + c a), cdf(-a)
// is e^(-a^2 / 2) t p(t), with p fitted to the smallest relative error, 2.3e-7.
struct GeluActivation {
  static float up_offset() { return 0.0f; }
  static float value(float x) { return slope(x).value; }
  static Slope slope(float x) {
    const float magnitude = metal::min(metal::fabs(x), 20.0f);  // beyond, the tail is 0
    const float density = metal::fast::exp2(-0.5f * M_LOG2E_F * magnitude * magnitude);
    const float t = metal::fast::divide(1.0f, 1.0f + 0.3f * magnitude);
    float p = 0.0360888243f * t - 0.158933669f;
    p = p * t + 0.209346309f;
    p = p * t - 0.0564500354f;
    p = p * t + 0.130032599f;
    p = p * t + 0.0994650722f;
    p = p * t + 0.120826311f;
    p = p * t + 0.11962454f;
    const float tail = density * (t * p);
    const float cdf = x > 0.0f ? 1.0f - tail : tail;
    Slope at;
    at.value = x * cdf;
    at.derivative = cdf + x * density * 0.39894228f;
    return at;
  }
};

// x (1 + tanh(y / 2)) / 2 = x sigmoid(y) with y = x (linear + cubic x^2).
struct GeluTanhActivation {
  static float up_offset() { return 0.0f; }
  static float linear() { return 1.59576912f; }                          // 2 sqrt(2 / pi)
  static float cubic() { return 0.0713548163f; }                         // 0.044715 of that
  static float near(float x) { return metal::clamp(x, -20.0f, 20.0f); }  // beyond, 0 or 1
  static Sigmoid sigmoid_at(float x) { return fast_sigmoid(x * (cubic() * x * x + linear())); }
  static float value(float x) { return x * sigmoid_at(near(x)).value; }
  static Slope slope(float x) {
    const float bounded = near(x);
    return slope_of_sigmoid(x, sigmoid_at(bounded), 3.0f * cubic() * bounded * bounded + linear());
  }
};

struct Relu2Activation {
  static float up_offset() { return 0.0f; }
  static float value(float x) { return slope(x).value; }
  static Slope slope(float x) {
    const float positive = x < 0.0f ? 0.0f : x;  // NaN stays NaN
    Slope at;
    at.value = positive * positive;
    at.derivative = 2.0f * positive;
    return at;
  }
};

// The sigmoid itself: sigmoid_gate. NaN passes through the exponential.
struct SigmoidActivation {
  static float up_offset() { return 0.0f; }
  static float value(float x) { return fast_sigmoid(x).value; }
  static Slope slope(float x) {
    const Sigmoid s = fast_sigmoid(x);
    Slope at;
    at.value = s.value;
    at.derivative = s.value * s.complement;
    return at;
  }
};

// The clamps of a gate; none if the limit is 0. Comparisons, because min and max would drop NaN.
METAL_FUNC float clamped_gate(float gate, float limit) {
  return limit > 0.0f && gate > limit ? limit : gate;
}

template <typename Activation>
METAL_FUNC float clamped_up(float up, float limit) {
  if (limit > 0.0f) {
    up = up > limit ? limit : up;
    up = up < -limit ? -limit : up;
  }
  return Activation::up_offset() == 0.0f ? up : up + Activation::up_offset();
}

template <typename Activation>
METAL_FUNC float gated_by(float gate, float up, float limit) {
  return Activation::value(clamped_gate(gate, limit)) * clamped_up<Activation>(up, limit);
}

// activation(gate) * up, for kernels whose activation is a parameter.
METAL_FUNC float gated_value(int activation, float limit, float gate, float up) {
  switch (activation) {
    case MLX_ANVIL_GELU:
      return gated_by<GeluActivation>(gate, up, limit);
    case MLX_ANVIL_GELU_TANH:
      return gated_by<GeluTanhActivation>(gate, up, limit);
    case MLX_ANVIL_RELU2:
      return gated_by<Relu2Activation>(gate, up, limit);
    case MLX_ANVIL_SWIGLU_OAI:
      return gated_by<SwigluOaiActivation>(gate, up, limit);
    default: {
      const float x = clamped_gate(gate, limit);
      return x * sigmoid(x).value * clamped_up<SiluActivation>(up, limit);
    }
  }
}

// log(1 + e^x) = max(x, 0) + log(1 + e^-|x|). The logarithm is 2 atanh(r) with r = z / (2 + z) up
// to 1/3, by its series. NaN for NaN.
METAL_FUNC float softplus(float x) {
  const float z = metal::precise::exp(-metal::fabs(x));
  const float r = z / (2.0f + z), square = r * r;
  float p = square * (1.0f / 15) + 1.0f / 13;
  p = p * square + 1.0f / 11;
  p = p * square + 1.0f / 9;
  p = p * square + 1.0f / 7;
  p = p * square + 1.0f / 5;
  p = p * square + 1.0f / 3;
  p = p * square + 1.0f;
  return (x < 0.0f ? 0.0f : x) + 2.0f * r * p;
}

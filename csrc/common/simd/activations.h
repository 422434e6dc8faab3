// Activations of gates, with the formulas of metal/common/activation.h. For kernel files only (see
// simd.h). An activation is a struct with `value` and `slope` (the value and its derivative); `up`
// is multiplied by it after kUpOffset is added.
#pragma once

#include "common/simd/math.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

struct Slope {
  f32v value;
  f32v derivative;
};

struct SiluActivation {
  static constexpr float kUpOffset = 0.0f;
  template <Accuracy kAccuracy>
  static f32v value(f32v x) {
    return silu<kAccuracy>(x);
  }
  template <Accuracy kAccuracy>
  static Slope slope(f32v x) {
    const Silu silu = silu_with_derivative<kAccuracy>(x);
    return {silu.value, silu.derivative};
  }
};

// GPT-OSS: x sigmoid(1.702 x), times up + 1.
struct SwigluOaiActivation {
  static constexpr float kUpOffset = 1.0f;
  static constexpr float kSlope = 1.702f;
  template <Accuracy kAccuracy>
  static f32v value(f32v x) {
    return times_sigmoid<kAccuracy>(x, x * kSlope);
  }
  // x times s (1 - s) first: slope times x may overflow.
  template <Accuracy kAccuracy>
  static Slope slope(f32v x) {
    const Sigmoid s = sigmoid<kAccuracy>(x * kSlope);
    return {x * s.value, s.value + x * (s.value * s.complement) * kSlope};
  }
};

// x cdf(x) with the normal distribution's cdf. In terms of a = |x| and t = 1 / (1 + c a), cdf(-a)
// is e^(-a^2 / 2) t p(t), with p fitted to the smallest relative error (2.3e-7; 4.6e-5 for 16
// bits).
struct GeluActivation {
  static constexpr float kUpOffset = 0.0f;

  struct Normal {
    f32v cdf;
    f32v density;  // times sqrt(2 pi)
  };

  template <Accuracy kAccuracy>
  static Normal normal(f32v x) {
    const f32v magnitude = absolute(x);
    const f32v density = exp_nonpositive<kAccuracy>(x * x * -0.5f);
    f32v t, p;
    if constexpr (kAccuracy == Accuracy::kFloat32) {
      t = 1.0f / (magnitude * 0.3f + 1.0f);
      p = t * 0.0360888243f - 0.158933669f;
      p = p * t + 0.209346309f;
      p = p * t - 0.0564500354f;
      p = p * t + 0.130032599f;
      p = p * t + 0.0994650722f;
      p = p * t + 0.120826311f;
      p = p * t + 0.11962454f;
    } else {
      t = 1.0f / (magnitude * 0.25f + 1.0f);
      p = t * 0.241726384f - 0.104193188f;
      p = p * t + 0.180666968f;
      p = p * t + 0.0804194063f;
      p = p * t + 0.101361215f;
    }
    const f32v tail = density * (t * p);
    return {x > splat(0.0f) ? 1.0f - tail : tail, density};
  }

  template <Accuracy kAccuracy>
  static f32v value(f32v x) {
    return x * normal<kAccuracy>(x).cdf;
  }
  template <Accuracy kAccuracy>
  static Slope slope(f32v x) {
    const Normal at = normal<kAccuracy>(x);
    return {x * at.cdf, at.cdf + x * at.density * 0.39894228040143268f};
  }
};

// x (1 + tanh(y / 2)) / 2 = x sigmoid(y) with y = x (kLinear + kCubic x^2).
struct GeluTanhActivation {
  static constexpr float kUpOffset = 0.0f;
  static constexpr float kLinear = 1.5957691216057308f;  // 2 sqrt(2 / pi)
  static constexpr float kCubic = 0.07135481627260025f;  // 0.044715 of that
  static constexpr float kSaturated = 20.0f;             // beyond, the sigmoid is 0 or 1

  static f32v near(f32v x) { return at_least(at_most(x, kSaturated), -kSaturated); }
  static f32v argument(f32v x) { return x * (x * x * kCubic + kLinear); }

  template <Accuracy kAccuracy>
  static f32v value(f32v x) {
    return times_sigmoid<kAccuracy>(x, argument(near(x)));
  }
  template <Accuracy kAccuracy>
  static Slope slope(f32v x) {
    const f32v bounded = near(x);
    const Sigmoid s = sigmoid<kAccuracy>(argument(bounded));
    const f32v slope = bounded * bounded * (3.0f * kCubic) + kLinear;
    return {x * s.value, s.value + x * (s.value * s.complement) * slope};
  }
};

struct Relu2Activation {
  static constexpr float kUpOffset = 0.0f;
  template <Accuracy>
  static f32v value(f32v x) {
    const f32v positive = at_least(x, 0.0f);
    return positive * positive;
  }
  template <Accuracy>
  static Slope slope(f32v x) {
    const f32v positive = at_least(x, 0.0f);
    return {positive * positive, positive * 2.0f};
  }
};

// The sigmoid itself: sigmoid_gate.
struct SigmoidActivation {
  static constexpr float kUpOffset = 0.0f;
  static f32v or_nan(f32v value, f32v x) { return x == x ? value : x; }  // sigmoid() drops NaN

  template <Accuracy kAccuracy>
  static f32v value(f32v x) {
    return or_nan(times_sigmoid<kAccuracy>(splat(1.0f), x), x);
  }
  template <Accuracy kAccuracy>
  static Slope slope(f32v x) {
    const Sigmoid s = sigmoid<kAccuracy>(x);
    return {or_nan(s.value, x), or_nan(s.value * s.complement, x)};
  }
};

// The clamps of a gate; none if the limit is 0. NaN passes.
inline f32v clamped_gate(f32v gate, float limit) {
  return limit > 0.0f ? at_most(gate, limit) : gate;
}

template <class Activation>
inline f32v clamped_up(f32v up, float limit) {
  up = limit > 0.0f ? at_least(at_most(up, limit), -limit) : up;
  return Activation::kUpOffset == 0.0f ? up : up + Activation::kUpOffset;
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

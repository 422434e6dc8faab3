#include "common/activation.h"

namespace mlx_anvil {

namespace {

constexpr float kSqrtHalf = 0.70710678118654752f;
constexpr float kNormalDensity = 0.39894228040143268f;  // 1 / sqrt(2 pi)

// gelu_tanh(x) = x sigmoid(x (kTanhLinear + kTanhCubic x^2))
constexpr float kTanhLinear = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float kTanhCubic = 0.07135481627260025f;  // 0.044715 of that
constexpr float kTanhSaturated = 20.0f;             // beyond, the sigmoid is 0 or 1

struct Sigmoids {
  mx::array value;       // s = sigmoid(x)
  mx::array complement;  // 1 - s, as sigmoid(-x), which does not cancel
};

Sigmoids sigmoids(const mx::array& x, mx::Stream s) {
  return {mx::sigmoid(x, s), mx::sigmoid(mx::negative(x, s), s)};
}

mx::array scaled(const mx::array& x, float factor, mx::Stream s) {
  return mx::multiply(x, mx::array(factor), s);
}

mx::array saturated(const mx::array& x, mx::Stream s) {
  return mx::minimum(mx::maximum(x, mx::array(-kTanhSaturated), s), mx::array(kTanhSaturated), s);
}

// (kTanhLinear + cubic x^2)
mx::array tanh_polynomial(const mx::array& x, float cubic, mx::Stream s) {
  return mx::add(scaled(mx::square(x, s), cubic, s), mx::array(kTanhLinear), s);
}

mx::array normal_cdf(const mx::array& x, mx::Stream s) {
  const mx::array erf = mx::erf(scaled(x, kSqrtHalf, s), s);
  return scaled(mx::add(erf, mx::array(1.0f), s), 0.5f, s);
}

}  // namespace

mx::array sigmoid_derivative(const mx::array& x, mx::Stream s) {
  const Sigmoids of_x = sigmoids(x, s);
  return mx::multiply(of_x.value, of_x.complement, s);
}

mx::array silu(const mx::array& x, mx::Stream s) {
  return mx::multiply(x, mx::sigmoid(x, s), s);
}

// s (1 + x (1 - s))
mx::array silu_derivative(const mx::array& x, mx::Stream s) {
  const Sigmoids sigmoid = sigmoids(x, s);
  return mx::multiply(sigmoid.value,
                      mx::add(mx::array(1.0f), mx::multiply(x, sigmoid.complement, s), s), s);
}

mx::array sloped_silu(const mx::array& x, float slope, mx::Stream s) {
  return mx::multiply(x, mx::sigmoid(scaled(x, slope, s), s), s);
}

// s + slope x s (1 - s); x (s (1 - s)) first, which does not overflow
mx::array sloped_silu_derivative(const mx::array& x, float slope, mx::Stream s) {
  const Sigmoids sigmoid = sigmoids(scaled(x, slope, s), s);
  const mx::array bell = mx::multiply(sigmoid.value, sigmoid.complement, s);
  return mx::add(sigmoid.value, scaled(mx::multiply(x, bell, s), slope, s), s);
}

mx::array gelu(const mx::array& x, mx::Stream s) {
  return mx::multiply(x, normal_cdf(x, s), s);
}

// cdf(x) + x density(x)
mx::array gelu_derivative(const mx::array& x, mx::Stream s) {
  const mx::array density =
      scaled(mx::exp(scaled(mx::square(x, s), -0.5f, s), s), kNormalDensity, s);
  return mx::add(normal_cdf(x, s), mx::multiply(x, density, s), s);
}

mx::array gelu_tanh(const mx::array& x, mx::Stream s) {
  const mx::array near = saturated(x, s);
  const mx::array y = mx::multiply(near, tanh_polynomial(near, kTanhCubic, s), s);
  return mx::multiply(x, mx::sigmoid(y, s), s);
}

mx::array gelu_tanh_derivative(const mx::array& x, mx::Stream s) {
  const mx::array near = saturated(x, s);
  const mx::array y = mx::multiply(near, tanh_polynomial(near, kTanhCubic, s), s);
  const mx::array slope = tanh_polynomial(near, 3.0f * kTanhCubic, s);
  const Sigmoids sigmoid = sigmoids(y, s);
  const mx::array bell = mx::multiply(sigmoid.value, sigmoid.complement, s);
  return mx::add(sigmoid.value, mx::multiply(mx::multiply(x, bell, s), slope, s), s);
}

mx::array relu2(const mx::array& x, mx::Stream s) {
  return mx::square(mx::maximum(x, mx::array(0.0f), s), s);
}

mx::array relu2_derivative(const mx::array& x, mx::Stream s) {
  return scaled(mx::maximum(x, mx::array(0.0f), s), 2.0f, s);
}

}  // namespace mlx_anvil

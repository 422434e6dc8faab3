#include "norm/compose.h"

#include "common/activation.h"
#include "common/broadcast.h"

namespace mlx_anvil {

namespace {

// The formulas, in float32 for every input dtype.
class Formulas {
 public:
  Formulas(const NormConfig& config, mx::Stream stream) : config_(config), s_(stream) {}

  mx::array wide(const mx::array& x) const { return mx::astype(x, mx::float32, s_); }
  mx::array add(const mx::array& a, const mx::array& b) const { return mx::add(a, b, s_); }
  mx::array times(const mx::array& a, const mx::array& b) const { return mx::multiply(a, b, s_); }
  // mx::mean() has no forward-mode derivative in a shapeless trace: it differentiates the count.
  mx::array mean(const mx::array& x) const {
    const mx::array fixed = mx::stop_gradient(x, s_);
    return times(mx::sum(x, -1, true, s_),
                 mx::number_of_elements(fixed, {-1}, /*inverted=*/true, mx::float32, s_));
  }

  // h - mean(h) for layer_norm, h for rms_norm.
  mx::array centred(const mx::array& h) const {
    return config_.centred ? mx::subtract(h, mean(h), s_) : h;
  }

  // 1 / sqrt(mean of squares + eps)
  mx::array scale_of(const mx::array& c) const {
    return mx::rsqrt(add(mean(mx::square(c, s_)), mx::array(config_.eps)), s_);
  }

  mx::array along(const mx::array& rows, const mx::array& vector) const {
    return stretch_to_rows(wide(vector), rows, s_);
  }

  mx::array weight_along(const mx::array& rows, const mx::array& weight) const {
    const mx::array factors = along(rows, weight);
    return config_.weight_offset == 0 ? factors : add(factors, mx::array(config_.weight_offset));
  }

  // The normalised rows times the weight, plus the bias.
  mx::array scaled(const mx::array& normed, const NormInputs& in) const {
    mx::array z = in.weight ? times(normed, weight_along(normed, *in.weight)) : normed;
    return in.bias ? add(z, along(normed, *in.bias)) : z;
  }

  // Sums rows to the shape of a weight or bias.
  mx::array sum_to(const mx::array& rows, const mx::array& vector) const {
    return mx::astype(sum_rows_to(rows, vector.shape(), s_), vector.dtype(), s_);
  }

 private:
  const NormConfig& config_;
  const mx::Stream s_;
};

}  // namespace

Arrays compose_norm(const NormConfig& config, const NormInputs& in, mx::Stream stream) {
  const Formulas f(config, stream);
  const mx::array h = in.residual ? f.add(in.x, *in.residual) : in.x;
  const mx::array centred = f.centred(f.wide(h));
  mx::array y = f.scaled(f.times(centred, f.scale_of(centred)), in);
  if (in.gate) {
    const mx::array gate = f.wide(*in.gate);
    y = f.times(y, config.gate_is_sigmoid ? mx::sigmoid(gate, stream) : silu(gate, stream));
  }
  Arrays outputs = {mx::astype(y, in.x.dtype(), stream)};
  if (in.residual) {
    outputs.push_back(h);
  }
  return outputs;
}

Arrays compose_norm_backward(const NormConfig& config,
                             const NormGradients& wanted,
                             const NormInputs& in,
                             const mx::array& d_y,
                             const std::optional<mx::array>& d_h,
                             mx::Stream stream) {
  const Formulas f(config, stream);
  const mx::Dtype dtype = in.x.dtype();
  const mx::array centred = f.centred(f.wide(in.x));
  const mx::array scale = f.scale_of(centred);
  const mx::array normed = f.times(centred, scale);

  mx::array d_z = f.wide(d_y);
  Arrays d_gate;
  if (in.gate) {
    const mx::array gate = f.wide(*in.gate);
    const bool is_sigmoid = config.gate_is_sigmoid;
    const mx::array value = is_sigmoid ? mx::sigmoid(gate, stream) : silu(gate, stream);
    const mx::array derivative =
        is_sigmoid ? sigmoid_derivative(gate, stream) : silu_derivative(gate, stream);
    d_gate = {mx::astype(f.times(f.times(d_z, f.scaled(normed, in)), derivative), dtype, stream)};
    d_z = f.times(d_z, value);
  }

  const mx::array d_normed = in.weight ? f.times(d_z, f.weight_along(d_z, *in.weight)) : d_z;
  mx::array d_centred =
      mx::subtract(d_normed, f.times(normed, f.mean(f.times(d_normed, normed))), stream);
  d_centred = f.times(scale, f.centred(d_centred));
  if (d_h) {
    d_centred = f.add(d_centred, f.wide(*d_h));
  }

  Arrays gradients = {mx::astype(d_centred, dtype, stream)};
  gradients.insert(gradients.end(), d_gate.begin(), d_gate.end());
  if (wanted.weight) {
    gradients.push_back(f.sum_to(f.times(d_z, normed), *in.weight));
  }
  if (wanted.bias) {
    gradients.push_back(f.sum_to(d_z, *in.bias));
  }
  return gradients;
}

}  // namespace mlx_anvil

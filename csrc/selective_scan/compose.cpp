#include "selective_scan/compose.h"

namespace mlx_anvil {

namespace {

// x[:, begin:end]
mx::array steps_of(const mx::array& x, int begin, int end, mx::Stream s) {
  mx::Shape first(x.ndim(), 0), last = x.shape();
  first[1] = begin;
  last[1] = end;
  return mx::slice(x, first, last, s);
}

// h[t] = decay[t] h[t - 1] + input[t], from h[-1] = 0.
mx::array all_states(mx::array decay, mx::array input, mx::Stream s) {
  const int steps = input.shape(1);
  for (int64_t distance = 1; distance < steps; distance *= 2) {
    const int shift = static_cast<int>(distance);
    const auto combined = [&](const mx::array& x, const mx::array& of_rest) {
      return mx::concatenate({steps_of(x, 0, shift, s), of_rest}, 1, s);
    };
    const mx::array own = steps_of(decay, shift, steps, s);
    const mx::array earlier = mx::multiply(own, steps_of(input, 0, steps - shift, s), s);
    const mx::array next = mx::add(steps_of(input, shift, steps, s), earlier, s);
    const mx::array both = mx::multiply(own, steps_of(decay, 0, steps - shift, s), s);
    input = combined(input, next);
    decay = combined(decay, both);
  }
  return input;
}

}  // namespace

Arrays compose_scan(const ScanConfig& config, const Arrays& inputs, mx::Stream s) {
  const ScanView in(config, inputs);
  const mx::Dtype dtype = in.x->dtype();
  const int steps = in.x->shape(1);
  const mx::array zero(0.0f);
  std::optional<mx::array> seen;  // [batch, steps, 1]
  if (in.lengths) {
    seen = mx::less(mx::expand_dims(mx::arange(0, steps, 1, mx::int32, s), {0, 2}, s),
                    mx::expand_dims(*in.lengths, {1, 2}, s), s);
  }
  const auto masked = [&](const mx::array& x) { return seen ? mx::where(*seen, x, zero, s) : x; };
  const auto rows = [&](const mx::array& x) { return masked(mx::astype(x, mx::float32, s)); };
  const mx::array x = rows(*in.x), b = rows(*in.b), c = rows(*in.c);
  mx::array step = rows(*in.dt);
  if (config.softplus) {
    step = masked(mx::logaddexp(step, zero, s));  // a step of 0 leaves the state alone
  }

  const mx::array decay = mx::exp(mx::multiply(mx::expand_dims(step, 3, s), *in.a, s), s);
  mx::array input =
      mx::multiply(mx::expand_dims(mx::multiply(step, x, s), 3, s), mx::expand_dims(b, 2, s), s);
  mx::array last = in.state ? *in.state : mx::zeros(in.state_shape(), mx::float32, s);
  if (in.state && steps > 0) {
    const mx::array first =
        mx::add(steps_of(input, 0, 1, s),
                mx::multiply(steps_of(decay, 0, 1, s), mx::expand_dims(*in.state, 1, s), s), s);
    input = mx::concatenate({first, steps_of(input, 1, steps, s)}, 1, s);
  }
  const mx::array states = all_states(decay, input, s);
  if (steps > 0) {
    last = mx::squeeze(steps_of(states, steps - 1, steps, s), 1, s);
  }
  mx::array y = mx::sum(mx::multiply(states, mx::expand_dims(c, 2, s), s), 3, false, s);
  if (in.d) {
    y = mx::add(y, mx::multiply(*in.d, x, s), s);
  }
  if (in.z) {
    const mx::array z = rows(*in.z);
    y = mx::multiply(y, mx::multiply(z, mx::sigmoid(z, s), s), s);
  }
  return {mx::astype(y, dtype, s), last};
}

}  // namespace mlx_anvil

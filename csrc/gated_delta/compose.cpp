#include "gated_delta/compose.h"

#include "common/mlx_ops.h"

namespace mlx_anvil {

namespace {

// scale x / sqrt(sum of squares + eps)
mx::array normalised(const mx::array& x, float eps, float scale, mx::Stream s) {
  const mx::array squares = mx::sum(mx::multiply(x, x, s), -1, true, s);
  const mx::array factor = mx::rsqrt(mx::add(squares, mx::array(eps), s), s);
  return mx::multiply(x, mx::multiply(factor, mx::array(scale), s), s);
}

// The rows of each step.
Arrays steps_of(const mx::array& x, mx::Stream s) {
  Arrays steps;
  for (const mx::array& step : mx::split(x, x.shape(1), 1, s)) {
    steps.push_back(mx::squeeze(step, 1, s));
  }
  return steps;
}

mx::array as_row(const mx::array& x, mx::Stream s) {
  return mx::expand_dims(x, -2, s);
}
mx::array as_column(const mx::array& x, mx::Stream s) {
  return mx::expand_dims(x, -1, s);
}

// S x, for each head
mx::array product(const mx::array& state, const mx::array& x, mx::Stream s) {
  return mx::sum(mx::multiply(state, as_row(x, s), s), -1, false, s);
}

// int32 [batch or 1, positions] -> [..., 1, 1, 1], among the steps
mx::array as_indices(const mx::array& positions, int steps, mx::Stream s) {
  mx::array at = mx::clip(positions, mx::array(0), mx::array(steps - 1), s);
  for (int axis = 0; axis < 3; ++axis) {
    at = as_column(at, s);
  }
  return at;
}

}  // namespace

Arrays compose_gated_delta(const GatedDeltaConfig& config,
                           const GatedDeltaInputs& in,
                           mx::Stream s) {
  const int batch = in.q.shape(0), length = in.q.shape(1), key_dim = in.q.shape(3);
  const int heads = in.v.shape(2), value_dim = in.v.shape(3), group = heads / in.q.shape(2);
  const auto widened = [&](const mx::array& x) { return mx::astype(x, mx::float32, s); };
  mx::array state =
      in.state ? *in.state : mx::zeros({batch, heads, value_dim, key_dim}, mx::float32, s);
  Arrays outputs, states;
  if (length > 0) {
    mx::array q = widened(in.q), k = widened(in.k);
    if (config.normalizes) {
      q = normalised(q, config.eps, config.q_scale, s);
      k = normalised(k, config.eps, 1.0f, s);
    }
    if (group > 1) {
      q = mx::repeat(q, group, 2, s);
      k = mx::repeat(k, group, 2, s);
    }
    const bool per_channel = in.g.ndim() == 4;
    const Arrays qs = steps_of(q, s), ks = steps_of(k, s), vs = steps_of(widened(in.v), s);
    const Arrays gs = steps_of(widened(in.g), s), betas = steps_of(widened(in.beta), s);
    const Arrays skips = in.skip ? steps_of(*in.skip, s) : Arrays{};
    const Arrays gates = in.gate ? steps_of(widened(*in.gate), s) : Arrays{};
    for (int t = 0; t < length; ++t) {
      const mx::array &k_t = ks[t], &g_t = gs[t];
      const mx::array decay = per_channel ? as_row(g_t, s) : as_column(as_column(g_t, s), s);
      const mx::array decayed = mx::multiply(state, decay, s);
      const mx::array error =
          config.corrects ? mx::subtract(vs[t], product(decayed, k_t, s), s) : vs[t];
      const mx::array change = mx::multiply(error, as_column(betas[t], s), s);
      mx::array next = mx::add(decayed, mx::multiply(as_column(change, s), as_row(k_t, s), s), s);
      mx::array y = product(next, qs[t], s);
      if (in.skip) {
        y = mx::add(y, mx::multiply(as_column(skips[t], s), vs[t], s), s);
      }
      if (in.gate) {
        y = mx::multiply(y, mx::multiply(gates[t], mx::sigmoid(gates[t], s), s), s);
      }
      if (in.lengths) {
        mx::array steps = mx::greater(*in.lengths, mx::array(t), s);
        for (int axis = 1; axis < 3; ++axis) {
          steps = as_column(steps, s);
        }
        y = choose(steps, y, mx::array(0.0f), s);
        next = choose(as_column(steps, s), next, state, s);
      }
      outputs.push_back(y);
      state = next;
      if (in.positions) {
        states.push_back(state);
      }
    }
  }
  mx::array y = length > 0 ? mx::stack(outputs, 1, s)
                           : mx::zeros({batch, 0, heads, value_dim}, mx::float32, s);
  Arrays results = {mx::astype(y, in.q.dtype(), s), state};
  if (in.positions) {
    results.push_back(
        mx::take_along_axis(mx::stack(states, 1, s), as_indices(*in.positions, length, s), 1, s));
  }
  return results;
}

}  // namespace mlx_anvil

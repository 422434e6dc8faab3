// The definition of rope in MLX ops.
#include <numbers>
#include <vector>

#include "common/broadcast.h"
#include "rope/primitive.h"

namespace mlx_anvil {

namespace {

// Applies rope_fixed_point() elementwise.
mx::array fixed_point(const mx::array& turns, mx::Stream s) {
  const mx::array fraction = mx::subtract(turns, mx::floor(turns, s), s);
  const mx::array one = mx::array(1.0, mx::float64), none = mx::array(0.0, mx::float64);
  const mx::array proper = mx::where(mx::less(fraction, one, s), fraction, none, s);
  return mx::astype(mx::multiply(proper, mx::array(0x1p64, mx::float64), s), mx::uint64, s);
}

// Angles [batch or 1, 1, length, pairs] in float64, which MLX supports on the CPU only. Whole turns
// overflow in 64-bit integers, as in the kernels (problem.h).
mx::array angles(const RopeConfig& config,
                 const RopePositions& positions,
                 int length,
                 mx::Stream s) {
  const mx::Dtype dtype = mx::float64;
  const auto number = [&](double x) { return mx::array(x, dtype); };
  const mx::array offset =
      mx::reshape(mx::astype(positions.offset, mx::uint64, s), {-1, 1, 1, 1}, s);
  const mx::array steps = mx::reshape(mx::arange(0.0, length, 1.0, mx::uint64, s), {-1, 1}, s);
  const mx::array position = mx::add(offset, steps, s);
  const auto fraction_of = [&](const mx::array& turns) {
    const mx::array signed_turns = mx::astype(mx::multiply(position, turns, s), mx::int64, s);
    return mx::multiply(mx::astype(signed_turns, dtype, s), number(0x1p-64), s);
  };
  const auto radians = [&](const mx::array& turns) {
    return mx::multiply(turns, number(2.0 * std::numbers::pi), s);
  };
  if (!positions.freqs) {
    const std::vector<uint64_t> turns = rope_turns(config.frequencies, config.pairs);
    return radians(fraction_of(mx::array(turns.begin(), mx::Shape{config.pairs}, mx::uint64)));
  }
  const mx::array per_position = mx::divide(number(rope_turns_over_freqs(config.frequencies)),
                                            mx::astype(*positions.freqs, dtype, s), s);
  // Integers have no derivative, and MLX differentiates through casts. This zero carries the
  // derivative of the turns, and is NaN if a frequency is not finite.
  const mx::array signed_position = mx::astype(mx::astype(position, mx::int64, s), dtype, s);
  const mx::array turns = mx::multiply(signed_position, per_position, s);
  const mx::array zero = mx::subtract(turns, mx::stop_gradient(turns, s), s);
  // Also stops the gradient before the integers: some ops' tangents are zeros on MLX's default
  // device.
  const mx::array fixed = fixed_point(mx::stop_gradient(per_position, s), s);
  const mx::array fraction = mx::stop_gradient(fraction_of(fixed), s);
  return radians(mx::add(fraction, zero, s));
}

mx::array rotate(const RopeConfig& config,
                 const mx::array& x,
                 const mx::array& cos_of_pair,
                 const mx::array& sin_of_pair,
                 mx::Stream s) {
  const int pairs = config.pairs, head_dim = x.shape(-1), length = x.shape(-2);
  const auto columns = [&](int begin, int end, int step) {
    return mx::slice(mx::astype(x, mx::float32, s), {0, 0, 0, begin},
                     {x.shape(0), x.shape(1), length, end}, {1, 1, 1, step}, s);
  };
  const mx::array a = config.traditional ? columns(0, 2 * pairs, 2) : columns(0, pairs, 1);
  const mx::array b = config.traditional ? columns(1, 2 * pairs, 2) : columns(pairs, 2 * pairs, 1);
  const mx::array cos = stretch_like(cos_of_pair, a, s);
  const mx::array sin = stretch_like(sin_of_pair, a, s);
  const auto times = [&](const mx::array& u, const mx::array& v) { return mx::multiply(u, v, s); };
  const mx::array first = mx::subtract(times(a, cos), times(b, sin), s);
  const mx::array second = mx::add(times(a, sin), times(b, cos), s);
  const mx::array rotated = config.traditional
                                ? mx::flatten(mx::stack({first, second}, -1, s), -2, -1, s)
                                : mx::concatenate({first, second}, -1, s);
  const mx::array rest = columns(2 * pairs, head_dim, 1);
  return mx::astype(mx::concatenate({rotated, rest}, -1, s), x.dtype(), s);
}

}  // namespace

Arrays compose_rope(const RopeConfig& config,
                    const Arrays& tensors,
                    const RopePositions& positions,
                    mx::Stream s) {
  const mx::Stream cpu =
      s.device == mx::Device::cpu ? s : mx::default_stream(mx::Device(mx::Device::cpu));
  const mx::array turned = angles(config, positions, tensors[0].shape(-2), cpu);
  const mx::array cos = mx::astype(mx::cos(turned, cpu), mx::float32, cpu);
  const mx::array forward = mx::astype(mx::sin(turned, cpu), mx::float32, cpu);
  const mx::array sin = config.inverse ? mx::negative(forward, s) : forward;
  Arrays outputs;
  for (const mx::array& x : tensors) {
    outputs.push_back(rotate(config, x, cos, sin, s));
  }
  return outputs;
}

}  // namespace mlx_anvil

#include <numbers>

#include "rope/primitive.h"

namespace mlx_anvil {

namespace {

// [batch or 1, 1, length, pairs] in float64, which only the CPU has, and without whole turns: at
// far positions float32, in which MLX computes sines and cosines of float64 too, leaves an angle
// few digits.
mx::array angles(const RopeConfig& config,
                 const RopePositions& positions,
                 int length,
                 mx::Stream s) {
  const mx::Dtype dtype = mx::float64;
  const auto number = [&](double x) { return mx::array(x, dtype); };
  mx::array frequencies = number(rope_turns_over_freqs(config.frequencies));
  if (positions.freqs) {
    frequencies = mx::divide(frequencies, mx::astype(*positions.freqs, dtype, s), s);
  } else {
    const mx::array exponents =
        mx::divide(mx::arange(0.0, config.pairs, 1.0, dtype, s), number(-config.pairs), s);
    const mx::array powers = mx::power(number(config.frequencies.base), exponents, s);
    frequencies = mx::multiply(frequencies, powers, s);
  }
  const mx::array offset = mx::reshape(mx::astype(positions.offset, dtype, s), {-1, 1, 1, 1}, s);
  const mx::array steps = mx::reshape(mx::arange(0.0, length, 1.0, dtype, s), {-1, 1}, s);
  const mx::array turns = mx::multiply(mx::add(offset, steps, s), frequencies, s);
  const mx::array fraction = mx::subtract(turns, mx::round(turns, 0, s), s);
  return mx::multiply(fraction, number(2.0 * std::numbers::pi), s);
}

mx::array rotate(const RopeConfig& config,
                 const mx::array& x,
                 const mx::array& cos,
                 const mx::array& sin,
                 mx::Stream s) {
  const int pairs = config.pairs, head_dim = x.shape(-1), length = x.shape(-2);
  const auto columns = [&](int begin, int end, int step) {
    return mx::slice(mx::astype(x, mx::float32, s), {0, 0, 0, begin},
                     {x.shape(0), x.shape(1), length, end}, {1, 1, 1, step}, s);
  };
  const mx::array a = config.traditional ? columns(0, 2 * pairs, 2) : columns(0, pairs, 1);
  const mx::array b = config.traditional ? columns(1, 2 * pairs, 2) : columns(pairs, 2 * pairs, 1);
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

#include "ssd_scan/ssd_scan.h"

#include <cmath>
#include <string>
#include <utility>

#include "common/checks.h"
#include "common/errors.h"
#include "common/mlx_ops.h"
#include "common/shapeless.h"
#include "gated_delta/checks.h"
#include "gated_delta/recurrence.h"

namespace mlx_anvil {

namespace {

void check_shapes(const mx::array& x,
                  const mx::array& dt,
                  const mx::array& a,
                  const mx::array& b,
                  const mx::array& c,
                  const SsdOptions& options) {
  if (x.ndim() != 4 || x.shape(2) == 0 || x.shape(3) == 0) {
    throw_value_error(kSsdScan, shape_text("x", x) +
                                    "; allowed: rank 4, [batch, length, heads, dim], with one head "
                                    "or more and a last axis of at least 1.");
  }
  const int batch = x.shape(0), length = x.shape(1), heads = x.shape(2);
  if (b.ndim() != 4 || b.shape(0) != batch || b.shape(1) != length || b.shape(2) == 0 ||
      heads % b.shape(2) != 0 || b.shape(3) == 0) {
    throw_value_error(kSsdScan, shape_text("B", b) + " and " + shape_text("x", x) +
                                    "; allowed: [batch, length, groups, states] with the batch and "
                                    "length of x, groups that divide its heads, and a state or "
                                    "more.");
  }
  require_shape(kSsdScan, {"C", c}, b.shape(), "the shape of B");
  require_shape(kSsdScan, {"dt", dt}, {batch, length, heads}, "one number per head of x");
  require_shape(kSsdScan, {"A", a}, {heads}, "one number per head of x");
  if (options.d) {
    require_shape(kSsdScan, {"D", *options.d}, {heads}, "one number per head of x");
  }
  if (options.z) {
    require_shape(kSsdScan, {"z", *options.z}, x.shape(), "the shape of x");
  }
  if (options.dt_bias) {
    require_shape(kSsdScan, {"dt_bias", *options.dt_bias}, {heads}, "one number per head of x");
  }
  if (options.state) {
    require_shape(kSsdScan, {"state", *options.state}, {batch, heads, x.shape(3), b.shape(3)},
                  "[batch, heads, dim, states]");
  }
}

void check(const mx::array& x,
           const mx::array& dt,
           const mx::array& a,
           const mx::array& b,
           const mx::array& c,
           const SsdOptions& options) {
  require_kernel_dtypes(kSsdScan, {{"x", x}, {"dt", dt}, {"A", a}, {"B", b}, {"C", c}});
  for (const auto& [name, given] : {std::pair{"D", &options.d},
                                    {"z", &options.z},
                                    {"state", &options.state},
                                    {"dt_bias", &options.dt_bias}}) {
    if (*given) {
      require_kernel_dtypes(kSsdScan, {{name, **given}});
    }
  }
  check_shapes(x, dt, a, b, c, options);
  if (options.limit && !(options.limit->first <= options.limit->second)) {
    throw_value_error(kSsdScan, "dt_limit is (" + std::to_string(options.limit->first) + ", " +
                                    std::to_string(options.limit->second) +
                                    "); allowed: None, or two numbers, the first no larger than "
                                    "the second.");
  }
}

// The optional arrays of a call, in the order in which a shapeless node takes them.
std::vector<std::optional<mx::array>*> extras_of(SsdOptions& options) {
  return {&options.d, &options.z, &options.state, &options.dt_bias, &options.lengths};
}

// True for the steps that count: [batch, length, 1].
mx::array counted(const mx::array& lengths, int steps, mx::Stream s) {
  return mx::less(mx::expand_dims(mx::arange(0, steps, 1, mx::int32, s), {0, 2}, s),
                  mx::expand_dims(lengths, {1, 2}, s), s);
}

// dt as the recurrence takes it, in float32. What is in padding, NaN too, has no part in it.
mx::array step_sizes(const mx::array& dt,
                     const SsdOptions& options,
                     const std::optional<mx::array>& lengths,
                     mx::Stream s) {
  const mx::array zero(0.0f);
  mx::array steps = mx::astype(dt, mx::float32, s);
  if (lengths) {
    steps = choose(counted(*lengths, dt.shape(1), s), steps, zero, s);
  }
  if (options.dt_bias) {
    steps = mx::add(steps, mx::astype(*options.dt_bias, mx::float32, s), s);
  }
  if (options.softplus) {
    steps = mx::logaddexp(steps, zero, s);
  }
  if (options.limit && options.limit->first > -INFINITY) {
    steps = mx::maximum(steps, mx::array(options.limit->first), s);
  }
  if (options.limit && options.limit->second < INFINITY) {
    steps = mx::minimum(steps, mx::array(options.limit->second), s);
  }
  return steps;
}

}  // namespace

GatedDeltaResult ssd_scan(const mx::array& x,
                          const mx::array& dt,
                          const mx::array& a,
                          const mx::array& b,
                          const mx::array& c,
                          const SsdOptions& options,
                          mx::StreamOrDevice stream) {
  check(x, dt, a, b, c, options);
  const mx::Stream s = require_stream(kSsdScan, stream);
  const std::optional<mx::array> lengths =
      options.lengths ? std::optional(checked_lengths(kSsdScan, *options.lengths, {"x", x}, s))
                      : std::nullopt;
  const std::optional<mx::array> positions =
      checked_positions(kSsdScan, options.return_states, {"x", x}, s);

  SsdOptions own = options;
  Arrays inputs = {x, dt, a, b, c};
  for (const auto* given : extras_of(own)) {
    OptionalInputs::append(inputs, *given);
  }
  if (const auto* given = std::get_if<mx::array>(&options.return_states)) {
    inputs.push_back(*given);
  }
  for (const mx::array& input : inputs) {
    if (traces_shapeless({&input})) {
      const auto graph = [options, s](const Arrays& in) -> Arrays {
        SsdOptions own = options;
        OptionalInputs rest(in, 5);
        for (auto* given : extras_of(own)) {
          rest.replace(*given);
        }
        if (auto* given = std::get_if<mx::array>(&own.return_states)) {
          *given = in.back();
        }
        const GatedDeltaResult result = ssd_scan(in[0], in[1], in[2], in[3], in[4], own, s);
        Arrays outputs = {result.y, result.state};
        OptionalInputs::append(outputs, result.states);
        return outputs;
      };
      return result_of(shapeless_node(kSsdScan, s, std::move(inputs), graph));
    }
  }

  mx::Dtype dtype = promoted_dtype({{"x", x}, {"B", b}, {"C", c}});
  if (options.z) {
    dtype = mx::promote_types(dtype, options.z->dtype());
  }
  const auto row = [&](const mx::array& given) { return mx::astype(given, dtype, s); };
  const auto exact = [&](const mx::array& given) { return mx::astype(given, mx::float32, s); };
  const mx::array steps = step_sizes(dt, options, lengths, s);
  const mx::array decays = mx::exp(mx::multiply(steps, exact(a), s), s);
  GatedDeltaConfig config;
  config.corrects = false;
  GatedDeltaInputs in{row(c), row(b), row(x), decays, steps};
  in.lengths = lengths;
  in.positions = positions;
  if (options.state) {
    in.state = exact(*options.state);
  }
  if (options.d) {
    in.skip = mx::broadcast_to(exact(*options.d), dt.shape(), s);
  }
  if (options.z) {
    in.gate = row(*options.z);
  }
  return run_recurrence(config, std::move(in), x.dtype(), s);
}

}  // namespace mlx_anvil

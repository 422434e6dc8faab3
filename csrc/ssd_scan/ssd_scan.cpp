#include "ssd_scan/ssd_scan.h"

#include <cmath>
#include <string>
#include <tuple>
#include <utility>

#include "common/checks.h"
#include "common/errors.h"
#include "gated_delta/checks.h"
#include "gated_delta/recurrence.h"
#include "ssd_scan/steps.h"

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

// The optional arrays of a call.
std::vector<mx::array*> extras_of(SsdOptions& options) {
  return present({&options.d, &options.z, &options.state, &options.dt_bias, &options.lengths},
                 options.return_states);
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

  const auto again = [s](const Arrays& in, const SsdOptions& own) {
    return ssd_scan(in[0], in[1], in[2], in[3], in[4], own, s);
  };
  if (auto node = when_shapeless(kSsdScan, {x, dt, a, b, c}, options, extras_of, again, s)) {
    return *std::move(node);
  }

  mx::Dtype dtype = promoted_dtype({{"x", x}, {"B", b}, {"C", c}});
  if (options.z) {
    dtype = mx::promote_types(dtype, options.z->dtype());
  }
  const auto row = [&](const mx::array& given) { return mx::astype(given, dtype, s); };
  const auto exact = [&](const mx::array& given) { return mx::astype(given, mx::float32, s); };
  SsdStepsConfig steps;
  steps.softplus = options.softplus;
  std::tie(steps.least, steps.most) = options.limit.value_or(std::pair{-INFINITY, INFINITY});
  const std::optional<mx::array> bias =
      options.dt_bias ? std::optional(exact(*options.dt_bias)) : std::nullopt;
  const Arrays gates = apply_ssd_steps(steps, dt, exact(a), bias, lengths, s);
  GatedDeltaConfig config;
  config.op = kSsdScan;
  config.corrects = false;
  GatedDeltaInputs in{row(c), row(b), row(x), gates[0], gates[1]};
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

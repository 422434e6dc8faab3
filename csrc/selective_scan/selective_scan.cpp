#include "selective_scan/selective_scan.h"

#include <string>

#include "common/checks.h"
#include "common/errors.h"
#include "common/ids.h"
#include "common/shapeless.h"
#include "selective_scan/primitive.h"

namespace mlx_anvil {

namespace {

void require_axes(const NamedArray& given, const mx::Shape& allowed, const char* meaning) {
  if (given.value.shape() != allowed) {
    throw_value_error(kSelectiveScan, std::string(given.name) + " has shape " +
                                          to_text(given.value.shape()) + "; allowed: " + meaning +
                                          ", " + to_text(allowed) + ".");
  }
}

void check_shapes(const mx::array& x,
                  const mx::array& dt,
                  const mx::array& a,
                  const mx::array& b,
                  const mx::array& c,
                  const ScanOptions& options) {
  if (x.ndim() != 3) {
    throw_value_error(kSelectiveScan, "x has shape " + to_text(x.shape()) +
                                          "; allowed: rank 3, [batch, steps, channels].");
  }
  const int batch = x.shape(0), steps = x.shape(1), channels = x.shape(2);
  if (a.ndim() != 2 || a.shape(0) != channels || a.shape(1) < 1) {
    throw_value_error(kSelectiveScan, "A has shape " + to_text(a.shape()) + " and x has shape " +
                                          to_text(x.shape()) +
                                          "; allowed: [channels, states], with states >= 1.");
  }
  const int states = a.shape(1);
  require_axes({"dt", dt}, x.shape(), "the shape of x");
  require_axes({"B", b}, {batch, steps, states}, "[batch, steps, states]");
  require_axes({"C", c}, {batch, steps, states}, "[batch, steps, states]");
  if (options.d) {
    require_axes({"D", *options.d}, {channels}, "[channels]");
  }
  if (options.z) {
    require_axes({"z", *options.z}, x.shape(), "the shape of x");
  }
  if (options.state) {
    require_axes({"state", *options.state}, {batch, channels, states}, "[batch, channels, states]");
  }
}

// Throws unless 0 <= length <= steps, where the host can read them. The kernels clamp the others.
mx::array checked_lengths(const mx::array& lengths, const mx::array& x, mx::Stream s) {
  require_integers(kSelectiveScan, {"lengths", lengths});
  require_axes({"lengths", lengths}, {x.shape(0)}, "one length per batch");
  const int steps = x.shape(1);
  for_each_readable(lengths, s, [&](int64_t length, int64_t) {
    require_inside(kSelectiveScan, "lengths", length, 0, steps);
  });
  return ids_in_int32(lengths, s);
}

}  // namespace

std::pair<mx::array, mx::array> selective_scan(const mx::array& x,
                                               const mx::array& dt,
                                               const mx::array& a,
                                               const mx::array& b,
                                               const mx::array& c,
                                               const ScanOptions& options,
                                               mx::StreamOrDevice stream) {
  require_kernel_dtypes(kSelectiveScan, {{"x", x}, {"dt", dt}, {"A", a}, {"B", b}, {"C", c}});
  for (const auto& [name, given] :
       {std::pair{"D", &options.d}, {"z", &options.z}, {"state", &options.state}}) {
    if (*given) {
      require_kernel_dtypes(kSelectiveScan, {{name, **given}});
    }
  }
  check_shapes(x, dt, a, b, c, options);
  const mx::Stream s = require_stream(kSelectiveScan, stream);
  const auto of = [](const std::optional<mx::array>& given) { return given ? &*given : nullptr; };
  if (traces_shapeless({&x, &dt, &a, &b, &c, of(options.d), of(options.z), of(options.state),
                        of(options.lengths)})) {
    Arrays inputs = {x, dt, a, b, c};
    for (const auto* given : {&options.d, &options.z, &options.state, &options.lengths}) {
      OptionalInputs::append(inputs, *given);
    }
    const auto graph = [options, s](const Arrays& in) -> Arrays {
      ScanOptions own = options;
      OptionalInputs rest(in, 5);
      for (auto* given : {&own.d, &own.z, &own.state, &own.lengths}) {
        rest.replace(*given);
      }
      const auto [y, state] = selective_scan(in[0], in[1], in[2], in[3], in[4], own, s);
      return {y, state};
    };
    const Arrays node = shapeless_node(kSelectiveScan, s, std::move(inputs), graph);
    return {node[0], node[1]};
  }

  mx::Dtype dtype = promoted_dtype({{"x", x}, {"dt", dt}, {"B", b}, {"C", c}});
  if (options.z) {
    dtype = mx::promote_types(dtype, options.z->dtype());
  }
  const auto row = [&](const mx::array& given) { return mx::astype(given, dtype, s); };
  const auto exact = [&](const mx::array& given) { return mx::astype(given, mx::float32, s); };
  ScanConfig config;
  config.softplus = options.softplus;
  Arrays inputs = {row(x), row(dt), exact(a), row(b), row(c)};
  if ((config.has_d = options.d.has_value())) {
    inputs.push_back(exact(*options.d));
  }
  if ((config.has_z = options.z.has_value())) {
    inputs.push_back(row(*options.z));
  }
  if ((config.has_state = options.state.has_value())) {
    inputs.push_back(exact(*options.state));
  }
  if ((config.has_lengths = options.lengths.has_value())) {
    inputs.push_back(checked_lengths(*options.lengths, x, s));
  }
  const Arrays results = apply_scan(config, std::move(inputs), s);
  return {results[0], results[1]};
}

}  // namespace mlx_anvil

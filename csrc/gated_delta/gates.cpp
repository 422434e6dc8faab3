#include "gated_delta/gates.h"

#include <cmath>
#include <string>

#include "common/checks.h"
#include "common/errors.h"
#include "common/launch.h"
#include "common/shapeless.h"
#include "common/trace.h"

namespace mlx_anvil {

namespace {

[[noreturn]] void throw_shape(const char* name, const mx::array& x, const std::string& allowed) {
  throw_value_error(kGatedDeltaGates, std::string(name) + " has shape " + to_text(x.shape()) +
                                          "; allowed: " + allowed + ".");
}

void check_shapes(const mx::array& a,
                  const mx::array& b,
                  const mx::array& a_log,
                  const mx::array& dt_bias) {
  if (b.ndim() == 0) {
    throw_shape("b", b, "[..., heads]");
  }
  const int heads = b.shape(-1);
  mx::Shape of_channels = b.shape();
  of_channels.push_back(a.ndim() == 0 ? 0 : a.shape(-1));
  const bool per_channel = a.ndim() == b.ndim() + 1;
  if (a.shape() != (per_channel ? of_channels : b.shape()) || (per_channel && a.shape(-1) == 0)) {
    throw_shape("a", a,
                "the shape of b, " + to_text(b.shape()) + ", or one axis more, of one or more");
  }
  if (a_log.shape() != mx::Shape{heads} && a_log.shape() != mx::Shape{heads, 1}) {
    throw_shape(
        "A_log", a_log,
        to_text(mx::Shape{heads}) + ", one number per head, or " + to_text(mx::Shape{heads, 1}));
  }
  const mx::Shape own = per_channel ? mx::Shape{heads, a.shape(-1)} : mx::Shape{heads};
  if (dt_bias.shape() != own) {
    throw_shape("dt_bias", dt_bias, to_text(own) + ", the heads and channels of a");
  }
}

}  // namespace

std::pair<mx::array, mx::array> gated_delta_gates(const mx::array& a,
                                                  const mx::array& b,
                                                  const mx::array& a_log,
                                                  const mx::array& dt_bias,
                                                  const GatesConfig& config,
                                                  mx::StreamOrDevice stream) {
  require_kernel_dtypes(kGatedDeltaGates,
                        {{"a", a}, {"b", b}, {"A_log", a_log}, {"dt_bias", dt_bias}});
  check_shapes(a, b, a_log, dt_bias);
  if (config.lower_bound && !std::isfinite(*config.lower_bound)) {
    throw_value_error(kGatedDeltaGates, "lower_bound is " + std::to_string(*config.lower_bound) +
                                            "; allowed: None, or a finite number.");
  }
  const mx::Stream s = require_stream(kGatedDeltaGates, stream);
  if (traces_shapeless({&a, &b, &a_log, &dt_bias})) {
    const auto graph = [config, s](const Arrays& in) -> Arrays {
      const auto [g, beta] = gated_delta_gates(in[0], in[1], in[2], in[3], config, s);
      return {g, beta};
    };
    const Arrays outputs = shapeless_node(kGatedDeltaGates, s, {a, b, a_log, dt_bias}, graph);
    return {outputs[0], outputs[1]};
  }
  const mx::Dtype dtype = promoted_dtype({{"a", a}, {"b", b}});
  const auto weight = [&](const mx::array& x) {
    return mx::astype(x, x.dtype() == dtype ? dtype : mx::float32, s);
  };
  const mx::array log = a_log.ndim() == 2 ? mx::squeeze(a_log, 1, s) : a_log;
  const Arrays outputs = apply_gates(
      config, {mx::astype(a, dtype, s), mx::astype(b, dtype, s), weight(log), weight(dt_bias)}, s);
  return {outputs[0], outputs[1]};
}

}  // namespace mlx_anvil

#include "causal_conv1d/causal_conv1d.h"

#include <string>

#include "causal_conv1d/primitive.h"
#include "common/checks.h"
#include "common/errors.h"
#include "common/ids.h"
#include "common/shapeless.h"

namespace mlx_anvil {

namespace {

void check(const CausalConvInputs& in) {
  require_kernel_dtypes(kCausalConv1d, {{"x", in.x}, {"weight", in.weight}});
  for (const auto& [name, x] : {std::pair{"bias", &in.bias}, {"state", &in.state}}) {
    if (*x) {
      require_kernel_dtypes(kCausalConv1d, {{name, **x}});
    }
  }
  if (in.lengths) {
    require_integers(kCausalConv1d, {"lengths", *in.lengths});
  }
  if (in.x.ndim() != 3) {
    throw_value_error(kCausalConv1d,
                      shape_text("x", in.x) + "; allowed: rank 3, [batch, time, channels].");
  }
  const int batch = in.x.shape(0), channels = in.x.shape(2);
  const mx::array& weight = in.weight;
  if (weight.ndim() != 2 || weight.shape(0) != channels || weight.shape(1) < kConvLeastWidth ||
      weight.shape(1) > kConvMostWidth) {
    throw_value_error(kCausalConv1d, shape_text("x", in.x) + " and " +
                                         shape_text("weight", weight) + "; allowed: a weight (" +
                                         std::to_string(channels) +
                                         ", width) with a width of 2 to 8.");
  }
  const auto require = [](const char* name, const std::optional<mx::array>& x,
                          const mx::Shape& shape, const char* meaning) {
    if (x) {
      require_shape(kCausalConv1d, {name, *x}, shape, meaning);
    }
  };
  require("bias", in.bias, {channels}, "the channels of x");
  require("state", in.state, {batch, weight.shape(1) - 1, channels},
          "[batch, width - 1, channels]");
  require("lengths", in.lengths, {batch}, "the batch of x");
}

}  // namespace

std::pair<mx::array, mx::array> causal_conv1d(const CausalConvInputs& in,
                                              bool silu,
                                              mx::StreamOrDevice stream) {
  check(in);
  const mx::Stream s = require_stream(kCausalConv1d, stream);
  Arrays inputs = {in.x, in.weight};
  for (const auto* other : {&in.bias, &in.state, &in.lengths}) {
    OptionalInputs::append(inputs, *other);
  }
  const auto or_null = [](const std::optional<mx::array>& x) { return x ? &*x : nullptr; };
  if (traces_shapeless(
          {&in.x, &in.weight, or_null(in.bias), or_null(in.state), or_null(in.lengths)})) {
    const Arrays node =
        shapeless_node(kCausalConv1d, s, std::move(inputs), [=](const Arrays& arrays) -> Arrays {
          CausalConvInputs own = in;
          own.x = arrays[0];
          own.weight = arrays[1];
          OptionalInputs others(arrays, 2);
          for (auto* other : {&own.bias, &own.state, &own.lengths}) {
            others.replace(*other);
          }
          const auto [y, state] = causal_conv1d(own, silu, s);
          return {y, state};
        });
    return {node[0], node[1]};
  }
  mx::Dtype dtype = inputs[0].dtype();
  const size_t floats = inputs.size() - in.lengths.has_value();
  for (size_t i = 1; i < floats; ++i) {
    dtype = mx::promote_types(dtype, inputs[i].dtype());
  }
  for (size_t i = 0; i < floats; ++i) {
    inputs[i] = mx::astype(inputs[i], dtype, s);
  }
  if (in.lengths) {
    inputs.back() = mx::stop_gradient(ids_in_int32(*in.lengths, s), s);
  }
  const ConvConfig config = {.silu = silu,
                             .has_bias = in.bias.has_value(),
                             .has_state = in.state.has_value(),
                             .has_lengths = in.lengths.has_value()};
  const Arrays outputs = apply_conv(config, std::move(inputs), s);
  return {outputs[0], outputs[1]};
}

}  // namespace mlx_anvil

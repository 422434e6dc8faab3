#include "causal_conv1d/causal_conv1d.h"

#include <string>

#include "causal_conv1d/primitive.h"
#include "common/checks.h"
#include "common/errors.h"
#include "common/ids.h"
#include "common/shapeless.h"

namespace mlx_anvil {

namespace {

std::string given(const char* name, const mx::array& x) {
  return std::string(name) + " has shape " + to_text(x.shape());
}

void require_shape(const char* name,
                   const std::optional<mx::array>& x,
                   const mx::Shape& shape,
                   const char* axes) {
  if (x && x->shape() != shape) {
    throw_value_error(kCausalConv1d,
                      given(name, *x) + "; allowed: " + to_text(shape) + ", " + axes + ".");
  }
}

void check(const CausalConvInputs& in) {
  const auto require_float = [](const char* name, const std::optional<mx::array>& x) {
    if (x) {
      require_kernel_dtypes(kCausalConv1d, {{name, *x}});
    }
  };
  require_kernel_dtypes(kCausalConv1d, {{"x", in.x}, {"weight", in.weight}});
  require_float("bias", in.bias);
  require_float("state", in.state);
  if (in.lengths && !mx::issubdtype(in.lengths->dtype(), mx::integer)) {
    throw_value_error(kCausalConv1d, "lengths has dtype " + to_text(in.lengths->dtype()) +
                                         "; allowed: integers, such as mx.int32.");
  }
  if (in.x.ndim() != 3) {
    throw_value_error(kCausalConv1d,
                      given("x", in.x) + "; allowed: rank 3, [batch, time, channels].");
  }
  const int batch = in.x.shape(0), channels = in.x.shape(2);
  const mx::array& weight = in.weight;
  if (weight.ndim() != 2 || weight.shape(0) != channels || weight.shape(1) < kConvLeastWidth ||
      weight.shape(1) > kConvMostWidth) {
    throw_value_error(kCausalConv1d, given("x", in.x) + " and " + given("weight", weight) +
                                         "; allowed: a weight (" + std::to_string(channels) +
                                         ", width) with a width of 2 to 8.");
  }
  require_shape("bias", in.bias, {channels}, "the channels of x");
  require_shape("state", in.state, {batch, weight.shape(1) - 1, channels},
                "[batch, width - 1, channels]");
  require_shape("lengths", in.lengths, {batch}, "the batch of x");
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
    const mx::array lengths = ids_in_32_bits(*in.lengths, s);
    // What int32 cannot hold is past every end.
    const mx::array most(in.x.shape(1), lengths.dtype());
    inputs.back() = mx::stop_gradient(lengths.dtype() == mx::int32
                                          ? lengths
                                          : mx::astype(mx::minimum(lengths, most, s), mx::int32, s),
                                      s);
  }
  const ConvConfig config = {.silu = silu,
                             .has_bias = in.bias.has_value(),
                             .has_state = in.state.has_value(),
                             .has_lengths = in.lengths.has_value()};
  const Arrays outputs = apply_conv(config, std::move(inputs), s);
  return {outputs[0], outputs[1]};
}

}  // namespace mlx_anvil

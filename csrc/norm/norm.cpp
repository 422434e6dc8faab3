#include "norm/norm.h"

#include <cmath>
#include <utility>

#include "common/checks.h"
#include "common/errors.h"
#include "common/shapeless.h"
#include "norm/apply.h"

namespace mlx_anvil {

namespace {

using OptionalArray = std::optional<mx::array>;

void require_floats(const char* op, const char* name, const OptionalArray& x) {
  if (x) {
    require_kernel_dtypes(op, {{name, *x}});
  }
}

void require_shape_of_x(const char* op,
                        const char* name,
                        const OptionalArray& x,
                        const mx::Shape& shape) {
  if (x && x->shape() != shape) {
    throw_value_error(op, std::string(name) + " has shape " + to_text(x->shape()) +
                              "; allowed: the shape of x, " + to_text(shape) + ".");
  }
}

void require_length(const char* op, const char* name, const OptionalArray& vector, int columns) {
  if (vector && vector->shape() != mx::Shape{columns}) {
    throw_value_error(op, std::string(name) + " has shape " + to_text(vector->shape()) +
                              "; allowed: " + to_text(mx::Shape{columns}) +
                              ", the last axis of x.");
  }
}

OptionalArray as(OptionalArray x, mx::Dtype dtype, mx::Stream stream) {
  return x ? OptionalArray(mx::astype(*std::move(x), dtype, stream)) : std::nullopt;
}

NormResult norm(bool centred,
                const mx::array& x,
                OptionalArray weight,
                NormOptions options,
                const mx::StreamOrDevice& stream);

NormResult shapeless(bool centred,
                     const mx::array& x,
                     const OptionalArray& weight,
                     const NormOptions& options,
                     mx::Stream s) {
  Arrays inputs = {x};
  for (const OptionalArray* other : {&weight, &options.residual, &options.gate, &options.bias}) {
    OptionalInputs::append(inputs, *other);
  }
  const auto graph = [=](const Arrays& in) -> Arrays {
    OptionalArray own_weight = weight;
    NormOptions own = options;
    OptionalInputs others(in, 1);
    for (OptionalArray* other : {&own_weight, &own.residual, &own.gate, &own.bias}) {
      others.replace(*other);
    }
    const NormResult result = norm(centred, in[0], own_weight, own, s);
    return result.second ? Arrays{result.first, *result.second} : Arrays{result.first};
  };
  const Arrays outputs =
      shapeless_node(centred ? "layer_norm" : "rms_norm", s, std::move(inputs), graph);
  return {outputs[0], options.residual ? OptionalArray(outputs[1]) : std::nullopt};
}

NormResult norm(bool centred,
                const mx::array& x,
                OptionalArray weight,
                NormOptions options,
                const mx::StreamOrDevice& stream) {
  NormConfig config;
  config.centred = centred;
  const char* const op = config.op();
  require_kernel_dtypes(op, {{"x", x}});
  require_floats(op, "weight", weight);
  require_floats(op, "bias", options.bias);
  require_floats(op, "residual", options.residual);
  require_floats(op, "gate", options.gate);
  if (x.ndim() == 0) {
    throw_value_error(op, "x has shape (); allowed: one axis or more; the last one is normalised.");
  }
  require_length(op, "weight", weight, x.shape(-1));
  require_length(op, "bias", options.bias, x.shape(-1));
  require_shape_of_x(op, "residual", options.residual, x.shape());
  require_shape_of_x(op, "gate", options.gate, x.shape());
  if (!(options.eps >= 0) || !std::isfinite(options.eps)) {
    throw_value_error(
        op, "eps is " + std::to_string(options.eps) + "; allowed: finite numbers, 0 or more.");
  }
  if (!std::isfinite(options.weight_offset)) {
    throw_value_error(op, "weight_offset is " + std::to_string(options.weight_offset) +
                              "; allowed: finite numbers.");
  }
  const mx::Stream s = require_stream(op, stream);
  const auto given = [](const OptionalArray& a) { return a ? &*a : nullptr; };
  if (traces_shapeless(
          {&x, given(weight), given(options.residual), given(options.gate), given(options.bias)})) {
    return shapeless(centred, x, weight, options, s);
  }

  mx::Dtype dtype = x.dtype();
  for (const OptionalArray* other : {&options.residual, &options.gate}) {
    dtype = *other ? mx::promote_types(dtype, (*other)->dtype()) : dtype;
  }
  // Weight and bias share one dtype, that of the rows or float32. Kernels exist for these
  // combinations.
  const auto is_of_rows = [&](const OptionalArray& v) { return !v || v->dtype() == dtype; };
  const mx::Dtype vector_dtype =
      is_of_rows(weight) && is_of_rows(options.bias) ? dtype : mx::float32;

  config.has_residual = options.residual.has_value();
  config.has_gate = options.gate.has_value();
  config.has_weight = weight.has_value();
  config.has_bias = options.bias.has_value();
  config.gate_is_sigmoid = config.has_gate && options.gate_is_sigmoid;
  config.eps = options.eps;
  config.weight_offset = config.has_weight ? options.weight_offset : 0;
  NormInputs in = {mx::astype(x, dtype, s), as(std::move(options.residual), dtype, s),
                   as(std::move(options.gate), dtype, s), as(std::move(weight), vector_dtype, s),
                   as(std::move(options.bias), vector_dtype, s)};
  const Arrays outputs = apply_norm(config, std::move(in), s);
  return {outputs[0], config.has_residual ? OptionalArray(outputs[1]) : std::nullopt};
}

}  // namespace

NormResult rms_norm(const mx::array& x,
                    OptionalArray weight,
                    NormOptions options,
                    mx::StreamOrDevice stream) {
  return norm(/*centred=*/false, x, std::move(weight), std::move(options), stream);
}

NormResult layer_norm(const mx::array& x,
                      OptionalArray weight,
                      NormOptions options,
                      mx::StreamOrDevice stream) {
  return norm(/*centred=*/true, x, std::move(weight), std::move(options), stream);
}

}  // namespace mlx_anvil

#include "quantized_matmul/python_matrix.h"

#include <nanobind/stl/string.h>

#include "common/python_args.h"

namespace mlx_anvil {

namespace {

std::optional<int> to_optional_int(const char* op, const char* argument, nb::handle value) {
  return value.is_none() ? std::nullopt
                         : std::optional(to_int32(op, argument, value, "None, or an int"));
}

}  // namespace

QuantizedOptions to_quantized_options(const char* op,
                                      nb::handle group_size,
                                      nb::handle bits,
                                      nb::handle mode) {
  if (!nb::isinstance<nb::str>(mode)) {
    throw_type_error(op, "mode", mode, "'affine', 'mxfp4', 'mxfp8', 'nvfp4'");
  }
  return {to_optional_int(op, "group_size", group_size), to_optional_int(op, "bits", bits),
          nb::cast<std::string>(mode)};
}

QuantizedMatrix to_quantized_matrix(
    const char* op, const char* prefix, nb::handle w, nb::handle scales, nb::handle biases) {
  QuantizedMatrix matrix{to_array(op, "w", w, prefix), to_array(op, "scales", scales, prefix), {}};
  if (!biases.is_none()) {
    matrix.biases = to_array(op, "biases", biases, prefix);
  }
  return matrix;
}

}  // namespace mlx_anvil

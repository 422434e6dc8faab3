#include "quantized_matmul/python_matrix.h"

#include <nanobind/stl/string.h>

#include "common/python_args.h"

namespace mlx_anvil {

namespace {

std::optional<int> to_optional_int(const char* op, const char* argument, nb::handle value) {
  int number = 0;
  if (value.is_none()) {
    return std::nullopt;
  }
  if (nb::isinstance<nb::bool_>(value) || !nb::try_cast(value, number)) {
    throw_type_error(op, argument, value, "None, or an int");
  }
  return number;
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
    const char* op, const std::string& prefix, nb::handle w, nb::handle scales, nb::handle biases) {
  const std::string w_name = prefix + "w", scales_name = prefix + "scales",
                    biases_name = prefix + "biases";
  std::optional<mx::array> optional_biases;
  if (!biases.is_none()) {
    optional_biases = to_array(op, biases_name.c_str(), biases);
  }
  return {to_array(op, w_name.c_str(), w), to_array(op, scales_name.c_str(), scales),
          optional_biases};
}

}  // namespace mlx_anvil

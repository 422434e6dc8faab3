#include "quantized_matmul/python_matrix.h"

#include <nanobind/stl/string.h>

#include "common/errors.h"
#include "common/python_args.h"

namespace mlx_anvil {

namespace {

std::optional<int> to_optional_int(const char* op, const std::string& argument, nb::handle value) {
  return value.is_none() ? std::nullopt
                         : std::optional(to_int32(op, argument.c_str(), value, "None, or an int"));
}

}  // namespace

QuantizedOptions to_quantized_options(
    const char* op, nb::handle group_size, nb::handle bits, nb::handle mode, const char* prefix) {
  const std::string name = prefix;
  if (!nb::isinstance<nb::str>(mode)) {
    throw_type_error(op, (name + "mode").c_str(), mode, "'affine', 'mxfp4', 'mxfp8', 'nvfp4'");
  }
  return {to_optional_int(op, name + "group_size", group_size),
          to_optional_int(op, name + "bits", bits), nb::cast<std::string>(mode)};
}

QuantizedMatrix to_quantized_matrix(
    const char* op, const char* prefix, nb::handle w, nb::handle scales, nb::handle biases) {
  QuantizedMatrix matrix{to_array(op, "w", w, prefix), to_array(op, "scales", scales, prefix), {}};
  if (!biases.is_none()) {
    matrix.biases = to_array(op, "biases", biases, prefix);
  }
  return matrix;
}

QuantizedMatrix to_quantized_tuple(const char* op, const char* argument, nb::handle parts) {
  const bool is_sequence = nb::isinstance<nb::tuple>(parts) || nb::isinstance<nb::list>(parts);
  if (!is_sequence) {
    throw_type_error(op, argument, parts, "a tuple (w, scales) or (w, scales, biases)");
  }
  const size_t count = nb::len(parts);
  if (count != 2 && count != 3) {
    throw_value_error(op, std::string(argument) + " has " + std::to_string(count) +
                              " entries; allowed: (w, scales) or (w, scales, biases).");
  }
  const nb::object biases = count == 3 ? nb::object(parts[2]) : nb::none();
  const std::string prefix = std::string(argument) + " ";
  return to_quantized_matrix(op, prefix.c_str(), parts[0], parts[1], biases);
}

}  // namespace mlx_anvil

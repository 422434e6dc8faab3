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

QuantizedOptions to_quantized_options(const char* op,
                                      nb::handle group_size,
                                      nb::handle bits,
                                      nb::handle mode,
                                      nb::handle activation_bits) {
  QuantizedOptions options = to_quantized_options(op, group_size, bits, mode);
  options.activation_bits = to_optional_int(op, "activation_bits", activation_bits);
  return options;
}

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

bool is_quantized_tuple(nb::handle value) {
  const bool is_sequence = nb::isinstance<nb::tuple>(value) || nb::isinstance<nb::list>(value);
  return is_sequence && nb::len(value) > 0 && nb::isinstance<mx::array>(value[0]);
}

std::pair<QuantizedOptions, QuantizedOptions> to_kv_options(const char* op,
                                                            nb::handle group_size,
                                                            nb::handle bits,
                                                            nb::handle mode) {
  const bool is_pair = nb::isinstance<nb::tuple>(bits) || nb::isinstance<nb::list>(bits);
  if (is_pair && nb::len(bits) != 2) {
    throw_value_error(op, "kv_bits has " + std::to_string(nb::len(bits)) +
                              " entries; allowed: None, an int, or a pair (of keys, of values).");
  }
  const auto of = [&](int side) {
    const nb::object own = is_pair ? nb::object(bits[side]) : nb::borrow(bits);
    return to_quantized_options(op, group_size, own, mode, "kv_");
  };
  return {of(0), of(1)};
}

void require_no_kv_options(const char* op, const QuantizedOptions& options, const char* names) {
  const auto refuse = [&](const std::string& argument) {
    const std::string arrays = names;
    throw_value_error(op, argument + ", but " + arrays + " are arrays; allowed: the default, or " +
                              arrays + " as tuples (w, scales[, biases]) of mx.quantize.");
  };
  if (options.bits) {
    refuse("kv_bits is " + std::to_string(*options.bits));
  }
  if (options.group_size) {
    refuse("kv_group_size is " + std::to_string(*options.group_size));
  }
  if (options.mode != "affine") {
    refuse("kv_mode is '" + options.mode + "'");
  }
}

}  // namespace mlx_anvil

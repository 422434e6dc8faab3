#include "gguf_matmul/python_args.h"

#include <nanobind/stl/string.h>

#include <string>

#include "common/errors.h"
#include "common/python_args.h"

namespace mlx_anvil {

namespace {

void require_none(const char* op, const std::string& name, nb::handle value, const char* why) {
  if (!value.is_none()) {
    throw_value_error(op,
                      name + " is given; allowed in the modes of GGUF: None, because " + why + ".");
  }
}

}  // namespace

std::optional<GgufOptions> to_gguf_options(const char* op,
                                           nb::handle group_size,
                                           nb::handle bits,
                                           nb::handle mode,
                                           nb::handle activation_bits) {
  if (!nb::isinstance<nb::str>(mode)) {
    return std::nullopt;
  }
  const std::optional<GgufKind> kind = gguf_kind(nb::cast<std::string>(mode));
  if (!kind) {
    return std::nullopt;
  }
  require_none(op, "group_size", group_size, "the mode fixes it");
  require_none(op, "bits", bits, "the mode fixes it");
  GgufOptions options{*kind};
  if (!activation_bits.is_none()) {
    options.activation_bits = to_int32(op, "activation_bits", activation_bits, "None, or an int");
  }
  return options;
}

const mx::array& to_gguf_matrix(
    const char* op, const char* prefix, nb::handle w, nb::handle scales, nb::handle biases) {
  require_none(op, std::string(prefix) + "scales", scales, "w holds the scales");
  require_none(op, std::string(prefix) + "biases", biases, "w holds the minima");
  return to_array(op, "w", w, prefix);
}

mx::array to_gguf_tuple(const char* op, const char* argument, nb::handle parts) {
  const bool is_sequence = nb::isinstance<nb::tuple>(parts) || nb::isinstance<nb::list>(parts);
  if (!is_sequence) {
    throw_type_error(op, argument, parts, "a tuple (w,) in the modes of GGUF");
  }
  const size_t count = nb::len(parts);
  if (count < 1 || count > 3) {
    throw_value_error(op, std::string(argument) + " has " + std::to_string(count) +
                              " entries; allowed in the modes of GGUF: (w,).");
  }
  const std::string prefix = std::string(argument) + " ";
  const auto part = [&](size_t i) { return i < count ? nb::object(parts[i]) : nb::none(); };
  const nb::object w = part(0);
  return to_gguf_matrix(op, prefix.c_str(), w, part(1), part(2));
}

}  // namespace mlx_anvil

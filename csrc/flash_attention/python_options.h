// Conversion of the options that functions of attention share.
#pragma once

#include <string>
#include <utility>

#include "common/errors.h"
#include "common/python_args.h"

namespace mlx_anvil {

inline std::optional<float> to_optional_number(const char* op,
                                               const char* argument,
                                               nb::handle value) {
  return value.is_none() ? std::nullopt
                         : std::optional(to_float32(op, argument, value, "None, or a number"));
}

// window_size. An int counts the keys on either side, including the query's own position.
inline std::pair<int64_t, int64_t> to_window(const char* op, nb::handle value) {
  const auto to_keys = [op](nb::handle keys) {
    return to_int(op, "window_size", keys, "None, an int, or a pair of ints (left, right)");
  };
  if (value.is_none()) {
    return {-1, -1};
  }
  if (nb::isinstance<nb::tuple>(value) || nb::isinstance<nb::list>(value)) {
    if (nb::len(value) != 2) {
      throw_value_error(op, "window_size has " + std::to_string(nb::len(value)) +
                                " entries; allowed: None, an int, or a pair (left, right).");
    }
    return {to_keys(value[0]), to_keys(value[1])};
  }
  const int64_t keys = to_keys(value);
  if (keys != -1 && keys < 1) {
    throw_value_error(op, "window_size is " + std::to_string(keys) +
                              "; allowed: at least 1 (the query's own position), or -1 for all.");
  }
  const int64_t side = keys == -1 ? -1 : keys - 1;
  return {side, side};
}

}  // namespace mlx_anvil

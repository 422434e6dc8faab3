// The two kinds of errors that ops throw, and the form of their text.
#pragma once

#include <stdexcept>
#include <string>

namespace mlx_anvil {

// The text of every error that a caller can see: "[op] what was given; what is allowed".
inline std::string op_message(const std::string& op, const std::string& text) {
  return "[" + op + "] " + text;
}

// Becomes Python's ValueError.
[[noreturn]] inline void throw_value_error(const std::string& op, const std::string& text) {
  throw std::invalid_argument(op_message(op, text));
}

// Becomes Python's RuntimeError: the library or its build is at fault, not the caller.
[[noreturn]] inline void throw_internal_error(const std::string& op, const std::string& text) {
  throw std::runtime_error(op_message(op, text));
}

}  // namespace mlx_anvil

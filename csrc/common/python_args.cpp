#include "common/python_args.h"

#include <cmath>

#include "common/errors.h"

namespace mlx_anvil {

namespace {

// Formats a number for a message. Python refuses to print integers of several thousand digits.
std::string text_of(nb::handle value) {
  const nb::object text = nb::steal(PyObject_Str(value.ptr()));
  if (text.is_valid() && nb::len(text) <= 40) {
    return nb::cast<std::string>(text);
  }
  PyErr_Clear();
  return "too long to print";
}

void require_number(const char* op,
                    const char* argument,
                    nb::handle value,
                    bool is_number,
                    const char* allowed,
                    const char* why_no_array = "") {
  const bool is_exact = PyFloat_CheckExact(value.ptr()) || PyLong_CheckExact(value.ptr());
  if (is_exact && is_number) {  // the common case, and the cheapest check
    return;
  }
  if (nb::isinstance<mx::array>(value)) {
    const std::string hint = std::string(allowed) + ", such as " + argument + ".item()";
    throw_type_error(op, argument, value, (hint + why_no_array).c_str());
  }
  if (nb::isinstance<nb::bool_>(value) || !is_number) {
    throw_type_error(op, argument, value, allowed);
  }
}

// Throws for a type that does not convert to a number, or for a number outside `range`.
[[noreturn]] void refuse_number(const char* op,
                                const char* argument,
                                nb::handle value,
                                const char* allowed,
                                const char* range) {
  if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_OverflowError)) {
    PyErr_Clear();
    throw_type_error(op, argument, value, allowed);
  }
  PyErr_Clear();
  throw_value_error(op,
                    std::string(argument) + " is " + text_of(value) + "; allowed: " + range + ".");
}

}  // namespace

void throw_type_error(const char* op, const char* argument, nb::handle value, const char* allowed) {
  const std::string given = nb::cast<std::string>(nb::type_name(value.type()));
  throw nb::type_error(
      op_message(op, std::string(argument) + " is a " + given + "; allowed: " + allowed + ".")
          .c_str());
}

const mx::array& to_array(const char* op,
                          const char* argument,
                          nb::handle value,
                          const char* prefix) {
  mx::array* array = nullptr;
  if (!nb::try_cast(value, array, /*convert=*/false) || !array) {
    throw_type_error(op, (std::string(prefix) + argument).c_str(), value, "mlx.core.array");
  }
  return *array;
}

std::optional<mx::array> to_optional_array(const char* op, const char* argument, nb::handle value) {
  return value.is_none() ? std::nullopt : std::optional(to_array(op, argument, value));
}

double to_number(const char* op, const char* argument, nb::handle value, const char* allowed) {
  require_number(op, argument, value, PyNumber_Check(value.ptr()) != 0, allowed,
                 ": an array would have no gradient");
  const double number = PyFloat_AsDouble(value.ptr());
  if (number == -1.0 && PyErr_Occurred()) {
    refuse_number(op, argument, value, allowed, "numbers in the range of float64");
  }
  return number;
}

int64_t to_int(const char* op, const char* argument, nb::handle value, const char* allowed) {
  require_number(op, argument, value, PyIndex_Check(value.ptr()) != 0, allowed);
  const nb::object index = nb::steal(PyNumber_Index(value.ptr()));
  int overflow = 0;
  const int64_t number =
      index.is_valid() ? PyLong_AsLongLongAndOverflow(index.ptr(), &overflow) : -1;
  if (overflow != 0 || PyErr_Occurred()) {
    refuse_number(op, argument, value, allowed, "64-bit ints");
  }
  return number;
}

int to_int32(const char* op, const char* argument, nb::handle value, const char* allowed) {
  const int64_t number = to_int(op, argument, value, allowed);
  if (number != static_cast<int>(number)) {
    refuse_number(op, argument, value, allowed, "32-bit ints");
  }
  return static_cast<int>(number);
}

float to_float32(const char* op, const char* argument, nb::handle value, const char* allowed) {
  const double number = to_number(op, argument, value, allowed);
  const float narrow = static_cast<float>(number);
  if (std::isfinite(number) && !std::isfinite(narrow)) {
    refuse_number(op, argument, value, allowed, "numbers in the range of float32");
  }
  return narrow;
}

bool to_bool(const char* op, const char* argument, nb::handle value) {
  if (!nb::isinstance<nb::bool_>(value)) {
    throw_type_error(op, argument, value, "a bool");
  }
  return nb::cast<bool>(value);
}

mx::StreamOrDevice to_stream_or_device(const char* op, nb::handle value) {
  mx::StreamOrDevice stream;
  if (!value.is_none() && !nb::try_cast(value, stream)) {
    throw_type_error(op, "stream", value, "None, mlx.core.Stream, mlx.core.Device");
  }
  return stream;
}

}  // namespace mlx_anvil

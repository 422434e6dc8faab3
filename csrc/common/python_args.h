// Conversion of Python arguments, with errors in the form that all our ops use. nanobind's own
// message
// ("incompatible function arguments") names neither the argument nor what it should have been.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>

#include <string>

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;
namespace nb = nanobind;

// The type part of a stream parameter in a signature.
#define MLX_ANVIL_STREAM_TYPE \
  "mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None"

// "[op] argument is a str; allowed: ...", as Python's TypeError.
[[noreturn]] void throw_type_error(const char* op,
                                   const char* argument,
                                   nb::handle value,
                                   const char* allowed);

// The array that `value` is; a TypeError that names the argument otherwise, with `prefix` before
// it.
const mx::array& to_array(const char* op,
                          const char* argument,
                          nb::handle value,
                          const char* prefix = "");

// Numbers of Python or NumPy, no bool. An array is refused: it would have no gradient, silently. A
// number that the C++ type cannot hold is a ValueError; NaN and infinity are left to the op's
// checks.
double to_number(const char* op,
                 const char* argument,
                 nb::handle value,
                 const char* allowed = "a number");
int64_t to_int(const char* op,
               const char* argument,
               nb::handle value,
               const char* allowed = "an int");
int to_int32(const char* op,
             const char* argument,
             nb::handle value,
             const char* allowed = "an int");

float to_float32(const char* op,
                 const char* argument,
                 nb::handle value,
                 const char* allowed = "a number");

bool to_bool(const char* op, const char* argument, nb::handle value);

// None, a stream or a device.
mx::StreamOrDevice to_stream_or_device(const char* op, nb::handle value);

}  // namespace mlx_anvil

// Conversion of Python arguments, with the error texts that all our ops use. nanobind's own message
// ("incompatible function arguments") names neither the argument nor the allowed types.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>

#include <optional>
#include <string>

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;
namespace nb = nanobind;

// The type of a stream parameter in a signature.
#define MLX_ANVIL_STREAM_TYPE \
  "mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None"

// Throws Python's TypeError: "[op] argument is a str; allowed: ...".
[[noreturn]] void throw_type_error(const char* op,
                                   const char* argument,
                                   nb::handle value,
                                   const char* allowed);

// Returns the array in `value`. Otherwise throws a TypeError that names the argument, after
// `prefix`.
const mx::array& to_array(const char* op,
                          const char* argument,
                          nb::handle value,
                          const char* prefix = "");

// The same of an argument that may be None.
std::optional<mx::array> to_optional_array(const char* op, const char* argument, nb::handle value);

// Converts Python and NumPy numbers, but no bool. An array is rejected, because it would silently
// lose its gradient. A number outside the C++ type's range is a ValueError. The op checks NaN and
// infinity.
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

// Accepts None, a stream or a device.
mx::StreamOrDevice to_stream_or_device(const char* op, nb::handle value);

}  // namespace mlx_anvil

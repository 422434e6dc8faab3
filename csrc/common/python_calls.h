// Explains calls of public functions that raise a TypeError, such as those with an unknown keyword.
// nanobind's own text lists overloads; it names neither the argument nor what it is called here.
#pragma once

#include <nanobind/nanobind.h>

namespace mlx_anvil {

void bind_calls(nanobind::module_& m);

}  // namespace mlx_anvil

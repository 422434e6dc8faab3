#pragma once

#include <nanobind/nanobind.h>

namespace mlx_anvil {

// What the Python side of trace(), strict(), info() and the tests is built on. Not public.
void bind_support(nanobind::module_& m);

}  // namespace mlx_anvil

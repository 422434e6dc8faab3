// Bindings that are not ops. csrc/bindings.cpp calls bind_support().
#pragma once

#include <nanobind/nanobind.h>

namespace mlx_anvil {

// Private functions behind trace(), strict(), info() and the tests.
void bind_support(nanobind::module_& m);

}  // namespace mlx_anvil

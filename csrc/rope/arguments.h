// The Python functions rope and rope_qk.
#pragma once

#include <nanobind/nanobind.h>

namespace mlx_anvil {

void bind_rope(nanobind::module_& m);

}  // namespace mlx_anvil

// The Python function softmax_topk.
#pragma once

#include <nanobind/nanobind.h>

namespace mlx_anvil {

void bind_softmax_topk(nanobind::module_& m);

}  // namespace mlx_anvil

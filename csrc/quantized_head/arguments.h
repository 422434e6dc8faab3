// The Python functions quantized_argmax and quantized_topk.
#pragma once

#include <nanobind/nanobind.h>

namespace mlx_anvil {

void bind_quantized_head(nanobind::module_& m);

}  // namespace mlx_anvil

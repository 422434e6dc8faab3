// Python arguments of ops with an activation.
#pragma once

#include "common/python_args.h"
#include "gated/gated.h"

namespace mlx_anvil {

// `limit` may be None.
GateOptions to_gate_options(const char* op, nb::handle activation, nb::handle limit);

}  // namespace mlx_anvil

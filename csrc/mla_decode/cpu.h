// mla_decode on the CPU, called from the primitive's stream task.
#pragma once

#include "mla_decode/problem.h"

namespace mlx_anvil {

void mla_decode_cpu(const MlaArgs& args);

}  // namespace mlx_anvil

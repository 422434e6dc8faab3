// Checks of mla_decode's arguments (see common/checks.h).
#pragma once

#include "mla_decode/mla_decode.h"

namespace mlx_anvil {

void check_mla_shapes(const mx::array& q_nope,
                      const mx::array& q_rope,
                      const mx::array& latent,
                      const mx::array& k_rope);

}  // namespace mlx_anvil

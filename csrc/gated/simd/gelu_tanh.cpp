#include "gated/simd/gated.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

MLX_ANVIL_DEFINE_GATE(gated_gelu_tanh, GeluTanhActivation)

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

// sigmoid_gate on the CPU: the formulas of csrc/gated with the sigmoid as activation.
#include "gated/simd/gated.h"
#include "sigmoid_gate/simd/kernels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

MLX_ANVIL_DEFINE_GATE(sigmoid_gate, SigmoidActivation)

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

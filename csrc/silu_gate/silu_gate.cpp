#include "silu_gate/silu_gate.h"

#include "common/activation.h"
#include "common/checks.h"
#include "common/gate.h"
#include "common/shapeless.h"
#include "silu_gate/simd/kernels.h"

namespace mlx_anvil {

namespace {

struct SiluGate {
  static constexpr const char* kOp = kSiluGate;
  static constexpr const char* kVariants[] = {"forward", "backward", "jvp"};
  static constexpr const char* kPrimitives[] = {"SiluGate", "SiluGateBackward", "SiluGateJvp"};
  static constexpr GateKernels kCpu = {.forward = silu_gate_forward_kernels,
                                       .backward = silu_gate_backward_kernels,
                                       .jvp = silu_gate_jvp_kernels};
  static constexpr float kUpOffset = 0.0f;

  static mx::array activation(const mx::array& x, mx::Stream s) { return silu(x, s); }
  static mx::array derivative(const mx::array& x, mx::Stream s) { return silu_derivative(x, s); }
};

}  // namespace

mx::array silu_gate(const mx::array& gate, const mx::array& up, mx::StreamOrDevice stream) {
  const std::initializer_list<NamedArray> arrays = {{"gate", gate}, {"up", up}};
  require_kernel_dtypes(kSiluGate, arrays);
  require_broadcastable(kSiluGate, arrays);
  const mx::Stream s = require_stream(kSiluGate, stream);
  if (traces_shapeless({&gate, &up})) {
    return shapeless_node(kSiluGate, s, {gate, up}, [s](const Arrays& in) -> Arrays {
      return {silu_gate(in[0], in[1], s)};
    })[0];
  }
  const mx::Dtype dtype = promoted_dtype(arrays);
  return apply_elementwise(GateVariants<SiluGate>::forward,
                           {mx::astype(gate, dtype, s), mx::astype(up, dtype, s)}, s)[0];
}

}  // namespace mlx_anvil

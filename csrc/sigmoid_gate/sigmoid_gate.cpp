#include "sigmoid_gate/sigmoid_gate.h"

#include "common/activation.h"
#include "common/checks.h"
#include "common/gate.h"
#include "common/shapeless.h"
#include "sigmoid_gate/simd/kernels.h"

namespace mlx_anvil {

namespace {

struct SigmoidGate {
  static constexpr const char* kOp = kSigmoidGate;
  static constexpr const char* kVariants[] = {"forward", "backward", "jvp"};
  static constexpr const char* kPrimitives[] = {"SigmoidGate", "SigmoidGateBackward",
                                                "SigmoidGateJvp"};
  static constexpr GateKernels kCpu = {.forward = sigmoid_gate_forward_kernels,
                                       .backward = sigmoid_gate_backward_kernels,
                                       .jvp = sigmoid_gate_jvp_kernels};
  static constexpr float kUpOffset = 0.0f;

  static mx::array activation(const mx::array& x, mx::Stream s) { return mx::sigmoid(x, s); }
  static mx::array derivative(const mx::array& x, mx::Stream s) { return sigmoid_derivative(x, s); }
};

}  // namespace

mx::array sigmoid_gate(const mx::array& x, const mx::array& gate, mx::StreamOrDevice stream) {
  const std::initializer_list<NamedArray> arrays = {{"x", x}, {"gate", gate}};
  require_kernel_dtypes(kSigmoidGate, arrays);
  require_broadcastable(kSigmoidGate, arrays);
  const mx::Stream s = require_stream(kSigmoidGate, stream);
  if (traces_shapeless({&x, &gate})) {
    return shapeless_node(kSigmoidGate, s, {x, gate}, [s](const Arrays& in) -> Arrays {
      return {sigmoid_gate(in[0], in[1], s)};
    })[0];
  }
  const mx::Dtype dtype = promoted_dtype(arrays);
  return apply_elementwise(GateVariants<SigmoidGate>::forward,
                           {mx::astype(gate, dtype, s), mx::astype(x, dtype, s)}, s)[0];
}

}  // namespace mlx_anvil

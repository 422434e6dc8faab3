// gated: out = activation(min(gate, limit)) * (clip(up, -limit, limit) + offset), and its
// derivatives. No clamp if the limit is 0; the offset is 1 for swiglu_oai, else 0. Activations:
//   silu        x / (1 + e^-x)
//   gelu        x cdf(x)
//   gelu_tanh   x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
//   relu2       max(x, 0)^2
//   swiglu_oai  x sigmoid(1.702 x)
//   backward:   d_gate = dy up activation'(gate), d_up = dy activation(gate), 0 where a clamp holds
//   jvp:        tangent = gate_tangent up activation'(gate) + up_tangent activation(gate)
//
// Kernels: gated_<activation>_<forward|backward|jvp>_<dtype>_<flat|strided>.
// Grid: see elementwise_flat and elementwise_strided. Threadgroup: 256 x 1 x 1.
//
// Bindings:
//   forward:  gate, up, out, params
//   backward: gate, up, dy, d_gate, d_up, params
//   jvp:      gate, up, gate_tangent, up_tangent, tangent, params
// Function constant 0: full packs are aligned to 16 bytes. The kernels assume no other alignment.
#include "metal/gated/kernels.h"

// ---- kernels

#include "metal/gated/instantiate.h"

MLX_ANVIL_GATE_KERNELS(gated_silu, SiluActivation)
MLX_ANVIL_GATE_KERNELS(gated_gelu, GeluActivation)
MLX_ANVIL_GATE_KERNELS(gated_gelu_tanh, GeluTanhActivation)
MLX_ANVIL_GATE_KERNELS(gated_relu2, Relu2Activation)
MLX_ANVIL_GATE_KERNELS(gated_swiglu_oai, SwigluOaiActivation)

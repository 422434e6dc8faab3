// sigmoid_gate: out = x s with s = sigmoid(gate) = 1 / (1 + e^-gate), and its derivatives. It is a
// gate of metal/gated/kernels.h whose `up` is x:
//   backward: d_gate = dy x s (1 - s), d_x = dy s
//   jvp:      tangent = gate_tangent x s (1 - s) + x_tangent s
//
// Kernels: sigmoid_gate_<forward|backward|jvp>_<dtype>_<flat|strided>.
// Grid: see elementwise_flat and elementwise_strided. Threadgroup: 256 x 1 x 1.
//
// Bindings:
//   forward:  gate, x, out, params
//   backward: gate, x, dy, d_gate, d_x, params
//   jvp:      gate, x, gate_tangent, x_tangent, tangent, params
// Function constant 0: full packs are aligned to 16 bytes. The kernels assume no other alignment.
#include "metal/gated/kernels.h"

// ---- kernels

#include "metal/gated/instantiate.h"

MLX_ANVIL_GATE_KERNELS(sigmoid_gate, SigmoidActivation)

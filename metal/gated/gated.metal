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
//
//   for each pack of this thread (flat: 2 of a contiguous run, strided: 1 of a row):
//     load the pack of every input, widened to float32
//     apply the formula of gated.h to each element
//     round to the dtype and store the pack of every output
#include "metal/common/elementwise.h"
#include "metal/common/kernel.h"
#include "metal/gated/gated.h"

template <typename T, bool kFlat, typename Activation>
[[kernel, max_total_threads_per_threadgroup(256)]] void gated_forward(
    const device T* gate [[buffer(0)]],
    const device T* up [[buffer(1)]],
    device T* out [[buffer(2)]],
    constant ElementwiseParams& params [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint3 thread_in_group [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  const Operands<T, GatedForward<Activation>> operands = {{gate, up}, {out}};
  elementwise<kFlat>(operands, params, group, groups, thread_in_group.x, threads.x);
}

template <typename T, bool kFlat, typename Activation>
[[kernel, max_total_threads_per_threadgroup(256)]] void gated_backward(
    const device T* gate [[buffer(0)]],
    const device T* up [[buffer(1)]],
    const device T* dy [[buffer(2)]],
    device T* d_gate [[buffer(3)]],
    device T* d_up [[buffer(4)]],
    constant ElementwiseParams& params [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint3 thread_in_group [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  const Operands<T, GatedBackward<Activation>> operands = {{gate, up, dy}, {d_gate, d_up}};
  elementwise<kFlat>(operands, params, group, groups, thread_in_group.x, threads.x);
}

template <typename T, bool kFlat, typename Activation>
[[kernel, max_total_threads_per_threadgroup(256)]] void gated_jvp(
    const device T* gate [[buffer(0)]],
    const device T* up [[buffer(1)]],
    const device T* gate_tangent [[buffer(2)]],
    const device T* up_tangent [[buffer(3)]],
    device T* tangent [[buffer(4)]],
    constant ElementwiseParams& params [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint3 thread_in_group [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  const Operands<T, GatedJvp<Activation>> operands = {{gate, up, gate_tangent, up_tangent},
                                                      {tangent}};
  elementwise<kFlat>(operands, params, group, groups, thread_in_group.x, threads.x);
}

// ---- kernels

#define INSTANTIATE(direction, activation, Activation, layout, flat, dtype, T) \
  MLX_ANVIL_KERNEL("gated_" #activation "_" #direction "_" #dtype "_" #layout, \
                   gated_##direction<T, flat, Activation>)

#define INSTANTIATE_DTYPES(direction, activation, Activation, layout, flat)    \
  INSTANTIATE(direction, activation, Activation, layout, flat, float32, float) \
  INSTANTIATE(direction, activation, Activation, layout, flat, float16, half)  \
  INSTANTIATE(direction, activation, Activation, layout, flat, bfloat16, bfloat)

#define INSTANTIATE_ACTIVATION(activation, Activation)                 \
  INSTANTIATE_DTYPES(forward, activation, Activation, flat, true)      \
  INSTANTIATE_DTYPES(forward, activation, Activation, strided, false)  \
  INSTANTIATE_DTYPES(backward, activation, Activation, flat, true)     \
  INSTANTIATE_DTYPES(backward, activation, Activation, strided, false) \
  INSTANTIATE_DTYPES(jvp, activation, Activation, flat, true)          \
  INSTANTIATE_DTYPES(jvp, activation, Activation, strided, false)

INSTANTIATE_ACTIVATION(silu, SiluActivation)
INSTANTIATE_ACTIVATION(gelu, GeluActivation)
INSTANTIATE_ACTIVATION(gelu_tanh, GeluTanhActivation)
INSTANTIATE_ACTIVATION(relu2, Relu2Activation)
INSTANTIATE_ACTIVATION(swiglu_oai, SwigluOaiActivation)

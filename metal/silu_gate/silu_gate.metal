// silu_gate: out = silu(gate) * up with silu(x) = x / (1 + e^-x), and its derivatives. With s =
// sigmoid(gate) and silu'(gate) = s (1 + gate (1 - s)):
//   backward: d_gate = dy up silu'(gate), d_up = dy silu(gate)
//   jvp:      tangent = gate_tangent up silu'(gate) + up_tangent silu(gate)
//
// Kernels: silu_gate_<forward|backward|jvp>_<dtype>_<flat|strided>.
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
//     apply the formula of silu_gate.h to each element
//     round to the dtype and store the pack of every output
#include "metal/common/elementwise.h"
#include "metal/common/kernel.h"
#include "metal/silu_gate/silu_gate.h"

template <typename T, bool kFlat>
[[kernel, max_total_threads_per_threadgroup(256)]] void silu_gate_forward(
    const device T* gate [[buffer(0)]],
    const device T* up [[buffer(1)]],
    device T* out [[buffer(2)]],
    constant ElementwiseParams& params [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint3 thread_in_group [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  const Operands<T, SiluGateForward> operands = {{gate, up}, {out}};
  elementwise<kFlat>(operands, params, group, groups, thread_in_group.x, threads.x);
}

template <typename T, bool kFlat>
[[kernel, max_total_threads_per_threadgroup(256)]] void silu_gate_backward(
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
  const Operands<T, SiluGateBackward> operands = {{gate, up, dy}, {d_gate, d_up}};
  elementwise<kFlat>(operands, params, group, groups, thread_in_group.x, threads.x);
}

template <typename T, bool kFlat>
[[kernel, max_total_threads_per_threadgroup(256)]] void silu_gate_jvp(
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
  const Operands<T, SiluGateJvp> operands = {{gate, up, gate_tangent, up_tangent}, {tangent}};
  elementwise<kFlat>(operands, params, group, groups, thread_in_group.x, threads.x);
}

// ---- kernels

#define INSTANTIATE(kernel_name, layout, flat, dtype, T) \
  MLX_ANVIL_KERNEL(#kernel_name "_" #dtype "_" #layout, kernel_name<T, flat>)

#define INSTANTIATE_DTYPES(kernel_name, layout, flat)    \
  INSTANTIATE(kernel_name, layout, flat, float32, float) \
  INSTANTIATE(kernel_name, layout, flat, float16, half)  \
  INSTANTIATE(kernel_name, layout, flat, bfloat16, bfloat)

INSTANTIATE_DTYPES(silu_gate_forward, flat, true)
INSTANTIATE_DTYPES(silu_gate_forward, strided, false)
INSTANTIATE_DTYPES(silu_gate_backward, flat, true)
INSTANTIATE_DTYPES(silu_gate_backward, strided, false)
INSTANTIATE_DTYPES(silu_gate_jvp, flat, true)
INSTANTIATE_DTYPES(silu_gate_jvp, strided, false)

// silu_gate: out = silu(gate) * up with silu(x) = x / (1 + e^-x), and its derivatives.
//
// Kernels: silu_gate_<forward|backward|jvp>_<dtype>_<flat|strided>. Bindings: inputs, outputs,
// params. Function constant 0: whether full packs of 16 bytes are aligned; the kernels assume
// nothing else. Threadgroup: 256 x 1 x 1. Grid: see elementwise_flat and elementwise_strided.
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

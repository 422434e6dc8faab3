// The kernels of a gate: templates of gated and sigmoid_gate, with the formulas of gated.h.
//
//   for each pack of this thread (flat: 2 of a contiguous run, strided: 1 of a row):
//     load the pack of every input, widened to float32
//     apply the formula of gated.h to each element
//     round to the dtype and store the pack of every output
#pragma once

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

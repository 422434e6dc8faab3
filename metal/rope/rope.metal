// rope: rotates pairs of elements of x [batch, heads, length, head_dim] by angles that grow with
// the position; rope_qk rotates two tensors that differ in their head counts only. For pair j at
// position l, with angle = (offset + l) * scale * base^(-j / pairs), or (offset + l) * scale /
// freqs[j]:
//   (a, b) -> (a cos - b sin, a sin + b cos)
//
// Kernels: rope_<one|qk>_<dtype>.
// Grid: x covers pack of columns, position and chunk of heads, one thread each; z covers batch rows
// and may be smaller than the batch. Threadgroup: 256 x 1 x 1.
//
// Bindings:
//   one: x, offset, freqs or turns, out, params
//   qk:  q, k, offset, freqs or turns, q_out, k_out, params
// Function constants: 0: full packs are aligned to 16 bytes (no other alignment is assumed); 1: the
// elements of a pair are adjacent; 2: frequencies are float32 freqs, else 64-bit turns; 3: offsets
// are int64, else int32; 4: see rope.h.
//
//   (chunk of heads, position, column pack) = this thread
//   for batch in z, z + groups.z, ...:
//     if the pack is in the rotated part: angles = turns * (offset + position), then sin and cos
//     for head in chunk:
//       rotated part: load both packs of pairs, rotate, store
//       rest:         copy one pack
#include "metal/common/kernel.h"
#include "metal/common/resident.h"
#include "metal/rope/rope.h"

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void rope_one(
    const device T* x [[buffer(0)]],
    const device int* offset [[buffer(1)]],
    const device ulong* turns [[buffer(2)]],
    device T* out [[buffer(3)]],
    constant RopeParams& params [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint3 thread_in_group [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  keep_resident<3, 4>(reads_ahead);
  rope(operands_of_one(x, out, offset, turns, params), params, group, groups, thread_in_group.x,
       threads.x);
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void rope_qk(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device int* offset [[buffer(2)]],
    const device ulong* turns [[buffer(3)]],
    device T* q_out [[buffer(4)]],
    device T* k_out [[buffer(5)]],
    constant RopeParams& params [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint3 thread_in_group [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]]) {
  keep_resident<3, 4>(reads_ahead);
  rope(operands_of_both(q, k, q_out, k_out, offset, turns, params), params, group, groups,
       thread_in_group.x, threads.x);
}

// ---- kernels

#define INSTANTIATE(kernel_name, dtype, T) MLX_ANVIL_KERNEL(#kernel_name "_" #dtype, kernel_name<T>)

#define INSTANTIATE_DTYPES(kernel_name)    \
  INSTANTIATE(kernel_name, float32, float) \
  INSTANTIATE(kernel_name, float16, half)  \
  INSTANTIATE(kernel_name, bfloat16, bfloat)

INSTANTIATE_DTYPES(rope_one)
INSTANTIATE_DTYPES(rope_qk)

// rope: rotates pairs of elements of x [batch, heads, length, head_dim] by angles that grow with
// the position; csrc/rope/problem.h has the formulas. rope_qk does so for two tensors that differ
// in their heads only.
//
// Kernels: rope_<one|qk>_<dtype>. Bindings: x (q, k), offset, freqs or turns, out (two of them),
// params. Function constants: 0: whether packs of 16 bytes are aligned; 1: whether pairs are
// neighbours; 2: whether the frequencies are freqs (float32) and not turns (64 bits each); 3:
// whether offsets are int64 and not int32. Grid: threads for every pack of columns, position and
// chunk of heads in x, batch rows in z, which may be fewer than there are. Threadgroup: 256 x 1
// x 1. Nothing but function constant 0 is assumed of the alignment.
#include "metal/common/kernel.h"
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
  const RopeTensor<T> only = {x, out, params.strides[0], params.heads[0]};
  const RopeOperands<T> operands = {
      {only, only}, offset, reinterpret_cast<const device float*>(turns), turns};
  rope(operands, params, group, groups, thread_in_group.x, threads.x);
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
  const RopeOperands<T> operands = {{{q, q_out, params.strides[0], params.heads[0]},
                                     {k, k_out, params.strides[1], params.heads[1]}},
                                    offset,
                                    reinterpret_cast<const device float*>(turns),
                                    turns};
  rope(operands, params, group, groups, thread_in_group.x, threads.x);
}

// ---- kernels

#define INSTANTIATE(kernel_name, dtype, T) MLX_ANVIL_KERNEL(#kernel_name "_" #dtype, kernel_name<T>)

#define INSTANTIATE_DTYPES(kernel_name)    \
  INSTANTIATE(kernel_name, float32, float) \
  INSTANTIATE(kernel_name, float16, half)  \
  INSTANTIATE(kernel_name, bfloat16, bfloat)

INSTANTIATE_DTYPES(rope_one)
INSTANTIATE_DTYPES(rope_qk)

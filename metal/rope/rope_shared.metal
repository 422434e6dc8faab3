// The same rotation as rope.metal, for many rows of whole heads on NVIDIA GPUs. A thread has one
// head, so that many threads wait for memory at a time, and threads share angles, which would
// otherwise take most of their instructions.
//
// Kernels: rope_shared_<one|qk>_<dtype>.
// Grid: x covers blocks of kAngles / pairs positions, for every kSize heads (the elements of a
// pack); z covers batch rows and may be smaller than the batch. Threadgroup: kAngles x 1 x 1.
// Bindings and function constants: as in rope.metal. Packs are aligned, head_dim is 2 * pairs, and
// pairs is a power of two, at least kSize and at most kAngles.
//
//   for batch in z, z + groups.z, ...:
//     read the thread's packs
//     angle of one position and pair = turns * (offset + position), then sin and cos; share them
//     rotate, store
#ifdef __MSLC__  // Apple's GPUs never launch these
#include "metal/common/kernel.h"
#include "metal/common/resident.h"
#include "metal/rope/rope.h"

enum { kAngles = 256 };

template <typename T>
METAL_FUNC void rope_of_threadgroup(const thread RopeOperands<T>& operands,
                                    constant RopeParams& params,
                                    threadgroup float (&sines)[kAngles],
                                    threadgroup float (&cosines)[kAngles],
                                    uint3 group,
                                    uint3 groups,
                                    uint thread_in_group) {
  enum { kSize = Pack<T>::kSize, kPacks = kAngles / kSize };  // packs of a head at all positions
  const int positions = kAngles / params.pairs, packs = params.pairs / kSize;
  const int blocks = (params.length + positions - 1) / positions;
  const int of_heads = group.x / blocks, first_position = (group.x - of_heads * blocks) * positions;
  const int item = thread_in_group, of_pack = item % kPacks;
  const int head = of_heads * kSize + item / kPacks, position = first_position + of_pack / packs;
  const bool exists = head < params.heads[0] + params.heads[1] && position < params.length;
  PairsOfThread<T> pairs;
  pairs.place(of_pack % packs * kSize, params);
  for (int batch = group.z; batch < params.batch; batch += int(groups.z)) {
    RopeHead<T> own;
    typename Pack<T>::Raw raw[2];
    if (exists) {
      own = head_at<T>(operands, params, batch, head, position);
      pairs.read(own.in, raw);
    }
    const ulong of_angle =
        operands.first_position(params, batch) + ulong(first_position + item / params.pairs);
    const SinCos angle = angle_of(operands, item % params.pairs, of_angle, params);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // of the batch before: all were read
    sines[item] = angle.sin;
    cosines[item] = angle.cos;
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (exists) {
      MLX_ANVIL_UNROLL
      for (int i = 0; i < int(kSize); ++i) {
        pairs.sin[i] = sines[of_pack * kSize + i];
        pairs.cos[i] = cosines[of_pack * kSize + i];
      }
      float x[2 * kSize];
      Pack<T>::widen(raw[0], x);
      Pack<T>::widen(raw[1], x + kSize);
      pairs.rotate(x, own.out);
    }
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kAngles)]] void rope_shared_one(
    const device T* x [[buffer(0)]],
    const device int* offset [[buffer(1)]],
    const device ulong* turns [[buffer(2)]],
    device T* out [[buffer(3)]],
    constant RopeParams& params [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_in_group [[thread_index_in_threadgroup]]) {
  keep_resident<5, 0>(packs_are_aligned);
  threadgroup float sines[kAngles], cosines[kAngles];
  rope_of_threadgroup(operands_of_one(x, out, offset, turns, params), params, sines, cosines, group,
                      groups, thread_in_group);
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kAngles)]] void rope_shared_qk(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device int* offset [[buffer(2)]],
    const device ulong* turns [[buffer(3)]],
    device T* q_out [[buffer(4)]],
    device T* k_out [[buffer(5)]],
    constant RopeParams& params [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_in_group [[thread_index_in_threadgroup]]) {
  keep_resident<5, 0>(packs_are_aligned);
  threadgroup float sines[kAngles], cosines[kAngles];
  rope_of_threadgroup(operands_of_both(q, k, q_out, k_out, offset, turns, params), params, sines,
                      cosines, group, groups, thread_in_group);
}

#endif

// ---- kernels

#ifdef __MSLC__
#define INSTANTIATE(kernel_name, dtype, T) MLX_ANVIL_KERNEL(#kernel_name "_" #dtype, kernel_name<T>)

#define INSTANTIATE_DTYPES(kernel_name)    \
  INSTANTIATE(kernel_name, float32, float) \
  INSTANTIATE(kernel_name, float16, half)  \
  INSTANTIATE(kernel_name, bfloat16, bfloat)

INSTANTIATE_DTYPES(rope_shared_one)
INSTANTIATE_DTYPES(rope_shared_qk)
#endif

// Finds the largest logits of each row of x and their indices, without storing all logits:
//   logit[m, n] = sum over k of x[m, k] W[n, k], rounded to T
//
// Kernels: quantized_head_<dtype>_<format>_r<rows>, for at most that many rows of x.
// Grid: (blocks of `slots` rows of w, blocks of rows of x). Threadgroup: 128 x 1 x 1.
// Bindings: x, w, scales, biases (x in place of absent ones), indices, values, candidates, params
// (QuantizedHeadParams).
//
// Kernels: quantized_head_logits_<dtype>, which reduces stored logits;
// quantized_head_merge_<dtype>, which reduces candidates. Grid: (blocks of `slots` candidates, rows
// of x). Threadgroup: 256 x 1 x 1. Bindings: logits or candidates before, indices, values,
// candidates after, params (BestParams).
//
// Function constants: 0: see dequant.h; 1: see gemv.h; 2: see best.h. merge and logits: 0 and 1 are
// false. Threadgroup memory 0: 8 bytes per slot and row of x. Candidates: [rows of x, blocks, run].
// With a single block, its best are the result, and values are bound in place of candidates.
// Otherwise indices and values are not written. Alignment: none beyond function constant 0. Arrays
// are dense.
//
//   head:  for each run of rows of w of this block:
//            totals = GEMV of these rows                          (pseudocode in gemv.h)
//            slots = candidates of (total rounded to T, index)
//   merge: slots = candidates of this block
//   logits: the same of logits
//   all:   keep_best: bitonic sort into runs, then merge pairs of runs
//          store the best: the result, or candidates for the next pass
#include "metal/common/kernel.h"
#include "metal/quantized_head/best.h"
#include "metal/quantized_matmul/formats.h"
#include "metal/quantized_matmul/gemv.h"

template <typename T, typename Format, int kRows>
[[kernel, max_total_threads_per_threadgroup(kGemvThreads)]] void quantized_head(
    const device T* x [[buffer(0)]],
    const device uint* w [[buffer(1)]],
    const device typename Format::template Scale<T>* scales [[buffer(2)]],
    const device T* biases [[buffer(3)]],
    device uint* indices [[buffer(4)]],
    device T* values [[buffer(5)]],
    device ulong* candidates [[buffer(6)]],
    constant QuantizedHeadParams& params [[buffer(7)]],
    threadgroup ulong* slots [[threadgroup(0)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  enum { kStreams = GemvStreams<kRows>::kCount };
  threadgroup float shares[kGemvSimdgroups][32];
  const int block = params.best.slots, first = int(group.x) * block;
  const int turn = columns_are_shared ? kStreams : kStreams * kGemvSimdgroups;
  for (int done = 0; done < block; done += turn) {
    const GemvPlace place =
        gemv_place(uint3((first + done) / turn, group.y, 0), simdgroup, lane, kRows, kStreams);
    const float total = gemv_of_place<T, Format, kRows>({w, scales, biases}, x, params.product,
                                                        place, simdgroup, lane, shares);
    const int n = place.first_output + lane % kStreams;
    if (stores_results(simdgroup) && lane < kRows * kStreams) {
      const float logit = static_cast<float>(static_cast<T>(total));
      slots[lane / kStreams * block + n - first] =
          n < params.product.outputs ? candidate_of(as_type<uint>(logit), n) : 0;
    }
    // The next iteration overwrites `shares`, and keep_best reads the slots of other threads.
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
  keep_best(slots, kRows, params.best, thread_index, kGemvThreads);
  for (int m = 0; m < kRows; ++m) {
    const int row = int(group.y) * kRows + m;
    if (row < params.product.rows) {
      store_best(slots + m * block, params.best, row, group.x, groups.x, indices, values,
                 candidates, thread_index, kGemvThreads);
    }
  }
}

enum { kMergeThreads = 256 };

// Position of a threadgroup of these kernels: its block of candidates, and its row of x.
struct MergePlace {
  uint3 group;
  uint3 groups;
  uint thread_index;
};

METAL_FUNC ulong slot_of(const device ulong* candidates, long row, int index, int count) {
  return candidates[row * count + index];
}
template <typename T>
METAL_FUNC ulong slot_of(const device T* logits, long row, int index, int count) {
  return candidate_of(as_type<uint>(static_cast<float>(logits[row * count + index])), index);
}

// Reduces the slots of `before` in this block.
template <typename From, typename T>
METAL_FUNC void reduce_block(const device From* before,
                             device uint* indices,
                             device T* values,
                             device ulong* candidates,
                             constant BestParams& params,
                             threadgroup ulong* slots,
                             MergePlace place) {
  const long row = place.group.y;
  const int first = int(place.group.x) * params.slots;
  for (int i = place.thread_index; i < params.slots; i += kMergeThreads) {
    const int from = first + i;
    slots[i] = from < params.candidates ? slot_of(before, row, from, params.candidates) : 0;
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  keep_best(slots, 1, params, place.thread_index, kMergeThreads);
  store_best(slots, params, row, place.group.x, place.groups.x, indices, values, candidates,
             place.thread_index, kMergeThreads);
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kMergeThreads)]] void quantized_head_merge(
    const device ulong* before [[buffer(0)]],
    device uint* indices [[buffer(1)]],
    device T* values [[buffer(2)]],
    device ulong* candidates [[buffer(3)]],
    constant BestParams& params [[buffer(4)]],
    threadgroup ulong* slots [[threadgroup(0)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  reduce_block(before, indices, values, candidates, params, slots, {group, groups, thread_index});
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kMergeThreads)]] void quantized_head_logits(
    const device T* logits [[buffer(0)]],
    device uint* indices [[buffer(1)]],
    device T* values [[buffer(2)]],
    device ulong* candidates [[buffer(3)]],
    constant BestParams& params [[buffer(4)]],
    threadgroup ulong* slots [[threadgroup(0)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  reduce_block(logits, indices, values, candidates, params, slots, {group, groups, thread_index});
}

// ---- kernels

#define INSTANTIATE_HEAD(name, format, dtype, type, rows)         \
  MLX_ANVIL_KERNEL("quantized_head_" #dtype "_" #name "_r" #rows, \
                   quantized_head<type, format, rows>)

#define INSTANTIATE_HEAD_DTYPE(dtype, type)                                    \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_HEAD, dtype, type, 1)                \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_HEAD, dtype, type, 2)                \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_HEAD, dtype, type, 4)                \
  MLX_ANVIL_QUANTIZED_FORMATS(INSTANTIATE_HEAD, dtype, type, 8)                \
  MLX_ANVIL_KERNEL("quantized_head_merge_" #dtype, quantized_head_merge<type>) \
  MLX_ANVIL_KERNEL("quantized_head_logits_" #dtype, quantized_head_logits<type>)

INSTANTIATE_HEAD_DTYPE(float32, float)
INSTANTIATE_HEAD_DTYPE(float16, half)
INSTANTIATE_HEAD_DTYPE(bfloat16, bfloat)

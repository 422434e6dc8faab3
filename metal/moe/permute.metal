// moe_permute for few pairs: sorts the pairs of a batch by expert, and copies the rows of their
// tokens, in one launch. Every simdgroup counts for itself how many pairs come before its own, so
// that none waits for another. csrc/moe/gpu.cpp says up to how many pairs.
//   place = number of pairs of lower experts, or of the same expert and before it
//   order[place] = pair, inverse[pair] = place, sorted[place] = expert, rows[place] = x[pair / k]
//   offsets[e] = number of pairs of experts below e
//
// Kernels: moe_sort_few_<items>, without rows, and moe_permute_few_<bits of a word>, with rows.
// Bindings: see params.h.
// Grid: moe_sort_few: (blocks of items, batches or fewer), an item being a pair, or one of the
// offsets. Threadgroup: 256, one simdgroup for each item. moe_permute_few: (pairs, then blocks of 4
// offsets; batches or fewer). Threadgroup: 128.
// Function constant 0: rows are whole, aligned vectors of 16 bytes. No other alignment is assumed.
//
//   moe_permute_few: count the pairs before mine             (simd_sum; each simdgroup the same)
//                    the first simdgroup stores the integers
//                    copy the row, all threads
#include "metal/common/kernel.h"
#include "metal/common/strided_pack.h"
#include "metal/moe/sort.h"

template <int kItems>
[[kernel, max_total_threads_per_threadgroup(256)]] void moe_sort_few(
    const device uchar* ids [[buffer(0)]],
    device int* offsets [[buffer(1)]],
    device int* order [[buffer(2)]],
    device int* inverse [[buffer(3)]],
    device int* sorted [[buffer(4)]],
    constant MoeSortParams& params [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint item = group.x * kItems + simdgroup;
  if (item > params.pairs + params.experts) {
    return;
  }
  for (uint batch = group.y; batch < params.batches; batch += groups.y) {
    SortedPairs of = {words_of(ids), offsets, order, inverse, sorted};
    of.move_to(batch, params);
    sort_item(of, item, true, params, lane);
  }
}

template <typename W>
METAL_FUNC void copy_row(const device W* from, device W* to, uint columns, uint thread_index) {
  enum { kThreads = 128, kWords = 16 / sizeof(W) };
  if (packs_are_aligned) {
    const device uint4* source = reinterpret_cast<const device uint4*>(from);
    device uint4* target = reinterpret_cast<device uint4*>(to);
    for (uint i = thread_index; i < columns / kWords; i += kThreads) {
      target[i] = source[i];
    }
    return;
  }
  for (uint i = thread_index; i < columns; i += kThreads) {
    to[i] = from[i];
  }
}

template <typename W>
[[kernel, max_total_threads_per_threadgroup(128)]] void moe_permute_few(
    const device uchar* ids [[buffer(0)]],
    const device W* x [[buffer(1)]],
    device int* offsets [[buffer(2)]],
    device int* order [[buffer(3)]],
    device int* inverse [[buffer(4)]],
    device int* sorted [[buffer(5)]],
    device W* rows [[buffer(6)]],
    constant MoeSortParams& params [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const bool has_pair = group.x < params.pairs;
  const uint item = has_pair ? group.x : params.pairs + (group.x - params.pairs) * 4 + simdgroup;
  if (item > params.pairs + params.experts) {
    return;
  }
  const uint token = has_pair ? group.x / params.chosen : 0u;
  for (uint batch = group.y; batch < params.batches; batch += groups.y) {
    SortedPairs of = {words_of(ids), offsets, order, inverse, sorted};
    of.move_to(batch, params);
    const uint place = sort_item(of, item, !has_pair || simdgroup == 0, params, lane);
    if (has_pair) {
      const uint tokens = params.pairs / params.chosen;
      const long from = static_cast<long>(batch) * tokens + token;
      const long to = static_cast<long>(batch) * params.pairs + place;
      copy_row<W>(x + from * params.columns, rows + to * params.columns, params.columns,
                  thread_index);
    }
  }
}

// ---- kernels

MLX_ANVIL_KERNEL("moe_sort_few_8", moe_sort_few<8>)
MLX_ANVIL_KERNEL("moe_permute_few_16", moe_permute_few<ushort>)
MLX_ANVIL_KERNEL("moe_permute_few_32", moe_permute_few<int>)

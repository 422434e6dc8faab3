// moe_permute for many pairs: a stable counting sort by expert, without atomics, so that the result
// is deterministic. A block is `block` adjacent pairs of a batch.
//   count: counts[block][e] = number of pairs of expert e in the block
//   place: offsets[e] = number of pairs of experts below e
//          start[e] = offsets[e] + pairs of e in the blocks before
//          place of a pair = start[e] + number of pairs of e before it in the block
//
// Kernels: moe_count_<lanes> and moe_place_<threads>. moe_spread (spread.metal) copies rows.
// Bindings: see params.h.
// Grid: (blocks, batches or fewer). Threadgroup: 32 for moe_count, 256 for moe_place.
// Threadgroup memory: a uint for each expert.
//
//   for each 32 pairs of the block, a lane each:
//     same = lanes with my expert                                (simd_ballot of each bit)
//     count: the last such lane adds popcount(same)
//     place: store place = start[e] + popcount(same below me); the last such lane moves start[e]
//   moe_place starts with all threads, an expert each, 256 at a time:
//     sum the counts of its blocks; prefix sum over the experts
//     the first simdgroup goes on to the pairs
#include "metal/common/kernel.h"
#include "metal/moe/sort.h"

// The lanes for which `value` holds, a bit each.
METAL_FUNC uint lanes_with(bool value) {
  return static_cast<uint>((uint64_t)metal::simd_ballot(value));
}

// A lane's pair, and the lanes whose pairs are of the same expert.
struct LanePair {
  uint pair;
  bool exists;
  uint expert;
  uint same;

  METAL_FUNC bool is_last(uint lane) const thread { return exists && same >> lane == 1; }
  METAL_FUNC uint rank(uint lane) const thread {
    return metal::popcount(same & ((1u << lane) - 1));
  }
};

METAL_FUNC LanePair lane_pair(const device uint* ids,
                              uint pair,
                              uint end,
                              constant MoeSortParams& params) {
  LanePair my;
  my.pair = pair;
  my.exists = pair < end;
  my.expert = my.exists ? expert_of(ids[pair], params) : 0u;
  my.same = lanes_with(my.exists);
  for (uint bit = 0; bit < params.expert_bits; ++bit) {
    const bool is_set = (my.expert >> bit & 1) != 0;
    const uint set = lanes_with(is_set);
    my.same &= is_set ? set : ~set;
  }
  return my;
}

template <int kThreads>
[[kernel, max_total_threads_per_threadgroup(32)]] void moe_count(
    const device uchar* ids [[buffer(0)]],
    device uint* counts [[buffer(1)]],
    constant MoeSortParams& params [[buffer(2)]],
    threadgroup uint* counted [[threadgroup(0)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint begin = group.x * params.block;
  const uint end = metal::min(begin + params.block, params.pairs);
  for (uint batch = group.y; batch < params.batches; batch += groups.y) {
    const device uint* const of_batch = words_of(ids) + static_cast<long>(batch) * params.pairs;
    for (uint expert = lane; expert < params.experts; expert += kThreads) {
      counted[expert] = 0u;
    }
    simdgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (uint first = begin; first < end; first += kThreads) {
      const LanePair my = lane_pair(of_batch, first + lane, end, params);
      if (my.is_last(lane)) {
        counted[my.expert] += metal::popcount(my.same);
      }
      simdgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
    const long block = static_cast<long>(batch) * params.blocks + group.x;
    for (uint expert = lane; expert < params.experts; expert += kThreads) {
      counts[block * params.experts + expert] = counted[expert];
    }
    simdgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
}

// Sums one value of each thread over the threads before it. `parts` has an element for each
// simdgroup; `total` becomes the sum of all.
template <int kThreads>
METAL_FUNC uint
sum_before(uint value, threadgroup uint* parts, uint simdgroup, uint lane, thread uint& total) {
  const uint inside = metal::simd_prefix_exclusive_sum(value);
  if (lane == kLanes - 1) {
    parts[simdgroup] = inside + value;
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  uint before = 0;
  total = 0;
  for (uint other = 0; other < kThreads / kLanes; ++other) {
    const uint part = parts[other];
    before += other < simdgroup ? part : 0u;
    total += part;
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  return before + inside;
}

template <int kThreads>
[[kernel, max_total_threads_per_threadgroup(256)]] void moe_place(
    const device uchar* ids [[buffer(0)]],
    const device uint* counts [[buffer(1)]],
    device int* offsets [[buffer(2)]],
    device int* order [[buffer(3)]],
    device int* inverse [[buffer(4)]],
    device int* sorted [[buffer(5)]],
    constant MoeSortParams& params [[buffer(6)]],
    threadgroup uint* start [[threadgroup(0)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint parts[kThreads / kLanes];
  const uint experts = params.experts, begin = group.x * params.block;
  const uint end = metal::min(begin + params.block, params.pairs);
  for (uint batch = group.y; batch < params.batches; batch += groups.y) {
    SortedPairs of = {words_of(ids), offsets, order, inverse, sorted};
    of.move_to(batch, params);
    uint lower = 0;  // pairs of the experts before these 256
    for (uint first = 0; first < experts; first += kThreads) {
      const uint expert = first + thread_index;
      const device uint* const column =
          counts + static_cast<long>(batch) * params.blocks * experts + expert;
      uint all = 0, before = 0;
      if (expert < experts) {
        for (uint block = 0; block < params.blocks; ++block) {
          const uint count = column[block * experts];
          before += block < group.x ? count : 0u;
          all += count;
        }
      }
      uint total = 0;
      const uint offset = lower + sum_before<kThreads>(all, parts, simdgroup, lane, total);
      if (expert < experts) {
        start[expert] = offset + before;
        if (group.x == 0) {
          of.offsets[expert] = static_cast<int>(offset);
        }
      }
      lower += total;
    }
    if (group.x == 0 && thread_index == 0) {
      of.offsets[experts] = static_cast<int>(params.pairs);
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (simdgroup == 0) {
      for (uint first = begin; first < end; first += kLanes) {
        const LanePair my = lane_pair(of.ids, first + lane, end, params);
        const uint place = my.exists ? start[my.expert] + my.rank(lane) : 0u;
        simdgroup_barrier(metal::mem_flags::mem_threadgroup);
        if (my.exists) {
          of.store(my.pair, place, my.expert);
        }
        if (my.is_last(lane)) {
          start[my.expert] = place + 1;
        }
        simdgroup_barrier(metal::mem_flags::mem_threadgroup);
      }
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
}

// ---- kernels

MLX_ANVIL_KERNEL("moe_count_32", moe_count<32>)
MLX_ANVIL_KERNEL("moe_place_256", moe_place<256>)

// What the sorts of moe_permute share: experts, and the place of a pair among few.
#pragma once

#include <metal_stdlib>

#include "metal/moe/lanes.h"
#include "metal/moe/params.h"

// Ids are int32 or uint32.
METAL_FUNC const device uint* words_of(const device uchar* ids) {
  return reinterpret_cast<const device uint*>(ids);
}

// Negative signed ids count from the end; ids out of range clamp.
METAL_FUNC uint expert_of(uint id, constant MoeSortParams& params) {
  const uint experts = params.experts;
  if (params.ids_are_signed != 0 && (id >> 31) != 0) {
    const uint from_end = id + experts;  // overflows if it is an expert
    return from_end < experts ? from_end : 0u;
  }
  return metal::min(id, experts - 1);
}

// Arrays of one batch.
struct SortedPairs {
  const device uint* ids;
  device int* offsets;
  device int* order;
  device int* inverse;
  device int* sorted;

  METAL_FUNC void move_to(uint batch, constant MoeSortParams& params) thread {
    const long first = static_cast<long>(batch) * params.pairs;
    ids += first;
    order += first;
    inverse += first;
    sorted += first;
    offsets += static_cast<long>(batch) * (params.experts + 1);
  }

  METAL_FUNC void store(uint pair, uint place, uint expert) const thread {
    order[place] = static_cast<int>(pair);
    inverse[pair] = static_cast<int>(place);
    sorted[place] = static_cast<int>(expert);
  }
};

// Returns how many pairs come before the first place of `expert`, or before `pair` if it is one of
// that expert's. All lanes of a simdgroup return it.
METAL_FUNC uint pairs_before(
    const device uint* ids, uint expert, uint pair, constant MoeSortParams& params, uint lane) {
  uint before = 0;
  for (uint other = lane; other < params.pairs; other += kLanes) {
    const uint of_other = expert_of(ids[other], params);
    before += of_other < expert || (of_other == expert && other < pair) ? 1u : 0u;
  }
  return metal::simd_sum(before);
}

// An item is a pair, or, after the pairs, one of the experts + 1 offsets. Returns the place of a
// pair.
METAL_FUNC uint
sort_item(SortedPairs of, uint item, bool stores, constant MoeSortParams& params, uint lane) {
  if (item < params.pairs) {
    const uint expert = expert_of(of.ids[item], params);
    const uint place = pairs_before(of.ids, expert, item, params, lane);
    if (stores && lane == 0) {
      of.store(item, place, expert);
    }
    return place;
  }
  const uint expert = item - params.pairs;
  const uint first = pairs_before(of.ids, expert, 0u, params, lane);
  if (stores && lane == 0) {
    of.offsets[expert] = static_cast<int>(first);
  }
  return 0u;
}

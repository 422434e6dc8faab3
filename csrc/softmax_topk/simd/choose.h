// Selects the k largest keys of a long row on the CPU. For kernel files only (see simd.h).
//
// Elements are divided into at least k groups. The k-th largest of the group maxima is a lower
// bound for every chosen key, so only the few elements that reach it are candidates. The rank of a
// candidate among all candidates is its place in the result.
#pragma once

#include "softmax_topk/simd/keys.h"
#include "softmax_topk/simd/scores.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Groups per choice. More groups cost time, but sharpen the bound.
inline constexpr int64_t kGroupsPerChoice = 2;

// Bit l is set if lane l is.
inline uint32_t lane_bits(i32v mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(bits_as<__m512i>(mask));
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(bits_as<__m256>(mask)));
#elif defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_ps(bits_as<__m128>(mask)));
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    bits |= static_cast<uint32_t>(mask[lane] & 1) << lane;
  }
  return bits;
#endif
}

// ranks[i] = the number of keys that precede key i: larger ones, and equal ones with a lower index.
// Both arrays are padded to whole vectors. The ranks of the padding are irrelevant.
inline void rank_keys(const int32_t* keys, int64_t count, int32_t* ranks) {
  int32_t lane[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    lane[i] = i;
  }
  for (int64_t first = 0; first < count; first += kLanes) {
    const i32v own = load_bits<i32v>(keys + first);
    const i32v place = load_bits<i32v>(lane) + static_cast<int32_t>(first);
    i32v rank = {};
    for (int64_t i = 0; i < count; ++i) {
      // One less if key i is the earlier one, so that it also precedes an equal key.
      const i32v earlier = place > static_cast<int32_t>(i);
      const i32v bound = bits_as<i32v>(bits_as<u32v>(own) + bits_as<u32v>(earlier));
      rank -= splat_key(keys[i]) > bound;
    }
    std::memcpy(ranks + first, &rank, sizeof(rank));
  }
}

// Scratch memory for the choice of one row. Every array is padded to whole vectors.
struct ChoiceMemory {
  int32_t* keys;        // of all experts
  int32_t* candidates;  // their keys
  int32_t* indices;     // their positions
  int32_t* ranks;
  int32_t* chosen_keys;  // one more than chosen
  int32_t* chosen_indices;

  ChoiceMemory(void* scratch, int64_t experts, int64_t chosen) {
    int32_t* next = static_cast<int32_t*>(scratch);
    for (int32_t** part : {&keys, &candidates, &indices, &ranks}) {
      *part = next;
      next += most_candidates(experts, chosen);
    }
    chosen_keys = next;
    chosen_indices = next + padded(chosen + 1);
  }

  static int64_t bytes(int64_t experts, int64_t chosen) {
    return 4 * (4 * most_candidates(experts, chosen) + 2 * padded(chosen + 1));
  }

 private:
  // Holds either the experts or the group maxima.
  static int64_t most_candidates(int64_t experts, int64_t chosen) {
    return padded(experts) + padded(kGroupsPerChoice * chosen);
  }
};

// Returns the `chosen`-th largest group maximum. Element i belongs to group i % groups.
inline int32_t bound_of_choice(const ChoiceMemory& memory, int64_t experts, int64_t chosen) {
  const int64_t groups = padded(kGroupsPerChoice * chosen);
  int32_t* const maxima = memory.candidates;
  for (int64_t group = 0; group < groups; group += kLanes) {
    i32v highest = splat_key(kNoKey);
    for (int64_t i = group; i < experts; i += groups) {
      highest = larger(highest, load_bits<i32v>(memory.keys + i));
    }
    std::memcpy(maxima + group, &highest, sizeof(highest));
  }
  rank_keys(maxima, groups, memory.ranks);
  int32_t bound = kNoKey;
  for (int64_t group = 0; group < groups; ++group) {
    bound = memory.ranks[group] == chosen - 1 ? maxima[group] : bound;
  }
  return bound;
}

// Collects keys above the bound in index order, then the first `chosen` keys equal to it. The limit
// keeps a row of equal logits from having more candidates than others.
inline int64_t collect_candidates(const ChoiceMemory& memory, int64_t experts, int64_t chosen) {
  const int32_t bound = bound_of_choice(memory, experts, chosen);
  int64_t count = 0, equal = 0;
  int32_t* const first_equal = memory.chosen_indices;
  for (int64_t i = 0; i < experts; i += kLanes) {
    const i32v keys = load_bits<i32v>(memory.keys + i);
    if (!lane_bits(keys >= bound)) {
      continue;
    }
    for (uint32_t bits = lane_bits(keys > bound); bits != 0; bits &= bits - 1) {
      const int64_t index = i + __builtin_ctz(bits);
      memory.candidates[count] = memory.keys[index];
      memory.indices[count++] = static_cast<int32_t>(index);
    }
    uint32_t bits = lane_bits(keys == bound);
    for (; bits != 0 && equal < chosen; bits &= bits - 1) {
      first_equal[equal++] = static_cast<int32_t>(i + __builtin_ctz(bits));
    }
  }
  for (int64_t i = 0; i < equal; ++i) {
    memory.candidates[count] = bound;
    memory.indices[count++] = first_equal[i];
  }
  return count;
}

// Fills chosen_keys and chosen_indices, largest key first. `memory.keys` must be set, and padded
// with kNoKey.
inline void choose(const ChoiceMemory& memory, int64_t experts, int64_t chosen) {
  const int64_t count = collect_candidates(memory, experts, chosen);
  rank_keys(memory.candidates, count, memory.ranks);
  for (int64_t i = 0; i < count; ++i) {
    // Rejected candidates share one slot past the end, which avoids an unpredictable branch.
    const int64_t place = memory.ranks[i] < chosen ? memory.ranks[i] : chosen;
    memory.chosen_keys[place] = memory.candidates[i];
    memory.chosen_indices[place] = memory.indices[i];
  }
}

// Sorts the choice by index.
inline void sort_by_index(const ChoiceMemory& memory, int64_t chosen) {
  int32_t *const keys = memory.candidates, *const opposites = memory.indices;
  for (int64_t i = 0; i < chosen; ++i) {
    keys[i] = memory.chosen_keys[i];
    opposites[i] = -memory.chosen_indices[i];
  }
  rank_keys(opposites, chosen, memory.ranks);
  for (int64_t i = 0; i < chosen; ++i) {
    memory.chosen_keys[memory.ranks[i]] = keys[i];
    memory.chosen_indices[memory.ranks[i]] = -opposites[i];
  }
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

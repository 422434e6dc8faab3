// The choice of the largest keys of a long row on the CPU. Kernel files only (see simd.h).
//
// The maxima of as many groups as there are to choose, or more, give a bound that all of those
// reach: the k-th largest of the maxima. The few elements that reach it too are candidates. The
// rank of each, by comparison with all of them, is its place in the result.
#pragma once

#include "softmax_topk/simd/keys.h"
#include "softmax_topk/simd/scores.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Groups for each one to choose: more of them cost time, and make the bound sharper.
inline constexpr int64_t kGroupsPerChoice = 2;

inline i32v larger(i32v a, i32v b) {
  return a > b ? a : b;
}

// Bit l: whether lane l is set.
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

// ranks[i]: how many keys come before key i: those that are larger, and those before it that are
// equal. Both arrays are padded to whole vectors; what ranks the padding gets does not matter.
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
      // One less where key i is the earlier one: then it comes first if it is equal, too.
      const i32v earlier = place > static_cast<int32_t>(i);
      const i32v bound = bits_as<i32v>(bits_as<u32v>(own) + bits_as<u32v>(earlier));
      rank -= splat_key(keys[i]) > bound;
    }
    std::memcpy(ranks + first, &rank, sizeof(rank));
  }
}

// Memory of a row's choice, all of it padded to whole vectors.
struct ChoiceMemory {
  int32_t* keys;        // of all experts
  int32_t* candidates;  // keys, and
  int32_t* indices;     // where they are from
  int32_t* ranks;
  int32_t* chosen_keys;  // one more than are chosen
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
  // The experts, or the maxima of groups.
  static int64_t most_candidates(int64_t experts, int64_t chosen) {
    return padded(experts) + padded(kGroupsPerChoice * chosen);
  }
};

// The `chosen`-th largest of the maxima of groups: element i is in group i % groups.
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

// In the order of their indices those above the bound, then the first of those that are equal to
// it: as many as may be chosen, so that a row of equal logits has no more candidates than others.
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

// Fills chosen_keys and chosen_indices, the largest key first. The keys are there, the vectors of
// them filled up with kNoKey.
inline void choose(const ChoiceMemory& memory, int64_t experts, int64_t chosen) {
  const int64_t count = collect_candidates(memory, experts, chosen);
  rank_keys(memory.candidates, count, memory.ranks);
  for (int64_t i = 0; i < count; ++i) {
    // Those that are not chosen go to one place beyond, without a branch that nobody could predict.
    const int64_t place = memory.ranks[i] < chosen ? memory.ranks[i] : chosen;
    memory.chosen_keys[place] = memory.candidates[i];
    memory.chosen_indices[place] = memory.indices[i];
  }
}

// Into the order of indices.
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

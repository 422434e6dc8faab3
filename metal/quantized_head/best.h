// Selects the best candidates of a block in threadgroup memory.
#pragma once

#include "metal/common/unroll.h"
#include "metal/quantized_head/candidate.h"
#include "metal/quantized_head/params.h"

// True if there is only one block, so that its best candidates are the result.
constant bool is_last [[function_constant(2)]];

// Orders two slots that lie `step` apart: the larger first, or last if `ascending`.
METAL_FUNC void order_pair(threadgroup ulong* slots, int first, int step, bool ascending) {
  const ulong a = slots[first], b = slots[first + step];
  const bool wrong = ascending ? a > b : a < b;
  slots[first] = wrong ? b : a;
  slots[first + step] = wrong ? a : b;
}

// Moves the best `run` candidates of each row to its front, in descending order. Rows of `slots`
// candidates follow each other. Each halving takes 1 + log2(run) steps over half as many pairs; run
// = 1 is a tree maximum. Call with every thread of the threadgroup, after a barrier.
METAL_FUNC void keep_best(
    threadgroup ulong* slots, int rows, BestParams params, uint thread_index, uint threads) {
  const int run = params.run;
  // Bitonic sort into runs, all in descending order at the end.
  for (int size = 2; size <= run; size *= 2) {
    for (int step = size / 2; step > 0; step /= 2) {
      for (int pair = thread_index; pair < rows * params.slots / 2; pair += threads) {
        const int first = 2 * pair - (pair & (step - 1));
        order_pair(slots, first, step, size < run && (first & size) != 0);
      }
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
  }
  // Merges two runs into the better half. Comparing opposite elements selects it as a bitonic
  // sequence, which the halving steps then sort.
  for (int distance = run; distance < params.slots; distance *= 2) {
    const int apart = 2 * distance / run;  // distance between remaining runs, in runs
    const int count = rows * params.slots / apart;
    for (int i = thread_index; i < count; i += threads) {
      const int place = i & (run - 1), first = (i - place) * apart;
      const ulong opposite = slots[first + distance + run - 1 - place];
      slots[first + place] = metal::max(slots[first + place], opposite);
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (int step = run / 2; step > 0; step /= 2) {
      for (int pair = thread_index; pair < count / 2; pair += threads) {
        const int i = 2 * pair - (pair & (step - 1)), place = i & (run - 1);
        order_pair(slots, (i - place) * apart + place, step, false);
      }
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
  }
}

// Stores the result of keep_best: as the op's output, or as candidates for the next pass. `row` is
// the row of x.
template <typename T>
METAL_FUNC void store_best(const threadgroup ulong* best,
                           BestParams params,
                           long row,
                           uint block,
                           uint blocks,
                           device uint* indices,
                           device T* values,
                           device ulong* candidates,
                           uint thread_index,
                           uint threads) {
  for (int i = thread_index; i < (is_last ? params.kept : params.run); i += threads) {
    if (is_last) {
      indices[row * params.kept + i] = index_of(best[i]);
      values[row * params.kept + i] = static_cast<T>(as_type<float>(value_bits_of(best[i])));
    } else {
      candidates[(row * blocks + block) * params.run + i] = best[i];
    }
  }
}

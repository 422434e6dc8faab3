// The best candidates of a block, in threadgroup memory.
#pragma once

#include "metal/common/unroll.h"
#include "metal/quantized_head/candidate.h"
#include "metal/quantized_head/params.h"

// Whether there is one block only, so that its best are the result.
constant bool is_last [[function_constant(2)]];

// Puts the greater of two slots `step` apart first, or second where `ascending`.
METAL_FUNC void order_pair(threadgroup ulong* slots, int first, int step, bool ascending) {
  const ulong a = slots[first], b = slots[first + step];
  const bool wrong = ascending ? a > b : a < b;
  slots[first] = wrong ? b : a;
  slots[first + step] = wrong ? a : b;
}

// Rows of `slots` candidates each, one behind the other: the best of each, `run` of them, come to
// its front, in descending order. Every halving of the candidates takes 1 + log2(run) steps, each
// of half as many pairs as those of the one before; with a run of 1 it is a maximum as a tree.
// Every thread of the threadgroup calls it, after a barrier.
METAL_FUNC void keep_best(
    threadgroup ulong* slots, int rows, BestParams params, uint thread_index, uint threads) {
  const int run = params.run;
  // Bitonic sort into runs, all of them in descending order at the end.
  for (int size = 2; size <= run; size *= 2) {
    for (int step = size / 2; step > 0; step /= 2) {
      for (int pair = thread_index; pair < rows * params.slots / 2; pair += threads) {
        const int first = 2 * pair - (pair & (step - 1));
        order_pair(slots, first, step, size < run && (first & size) != 0);
      }
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
  }
  // Of two runs the better half: opposite each other the greater ones are all of it, and they first
  // fall and then rise, or the other way round, which halving steps put in order.
  for (int distance = run; distance < params.slots; distance *= 2) {
    const int apart = 2 * distance / run;  // of the runs that are left, in runs
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

// What keep_best left of a block, to where the caller of the op, or the next pass, will look for
// it. `row`: of x.
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

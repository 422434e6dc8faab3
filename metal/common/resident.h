// A bound on registers, for kernels that wait for memory: more threadgroups then wait at a time.
// And whether a kernel should read its parameters before it branches.
#pragma once

#include <metal_stdlib>

// Leaves room for `count` threadgroups per multiprocessor if `wanted`, which is the function
// constant with that index. Only PTX has such a bound: it is part of the text that the loader
// completes. In Metal, a pipeline's registers decide how many threads it gets.
template <int count, int index>
METAL_FUNC void keep_resident(bool wanted) {
#ifdef __MSLC_PTX__
  mslc::keep_resident<count, index>();
#endif
  (void)wanted;
}

// Before the first branch, a compiler for Apple's GPUs loads a parameter once for all threads. In
// PTX parameters are constant memory, and reading them early would only take registers.
#ifdef __MSLC_PTX__
#define MLX_ANVIL_READS_EARLY false
#else
#define MLX_ANVIL_READS_EARLY true
#endif

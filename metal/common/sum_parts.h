// Adds up partial sums in a fixed order, so that results do not depend on scheduling.
#pragma once

#include <metal_stdlib>

#include "metal/common/unroll.h"

enum { kSumThreads = 1024, kSumColumns = 32, kSumSimdgroups = kSumThreads / kSumColumns };
enum { kRunParts = 32 * kSumSimdgroups };  // 32 parts per simdgroup

// sum[column] = the sum of `count` rows of parts, `columns` apart. Threadgroup: kSumThreads, for
// kSumColumns columns from block * kSumColumns on. Each lane has one column, each simdgroup sums
// every 32nd part. `shares` has room for kSumThreads numbers.
template <typename W>
METAL_FUNC void sum_parts(const device float* parts,
                          uint count,
                          uint columns,
                          device W* sum,
                          uint block,
                          uint simdgroup,
                          uint lane,
                          threadgroup float* shares) {
  const uint column = block * kSumColumns + lane;
  const bool exists = column < columns;
  const device float* const own = parts + column;
  // Sums in runs first, so that adding many parts loses no digits.
  float total = 0.0f;
  for (uint run = simdgroup; exists && run < count; run += kRunParts) {
    const uint end = metal::min(count, run + kRunParts);
    float sum_of_run = 0.0f;
    for (uint part = run; part < end; part += kSumSimdgroups) {
      sum_of_run += own[long(part) * columns];
    }
    total += sum_of_run;
  }
  shares[simdgroup * kSumColumns + lane] = total;
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  if (simdgroup != 0 || !exists) {
    return;
  }
  total = 0.0f;
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kSumSimdgroups; ++i) {
    total += shares[i * kSumColumns + lane];
  }
  sum[column] = static_cast<W>(total);
}

// Cuts pairs into tiles: runs of adjacent pairs with one expert, of up to `rows` pairs. Pairs that
// are sorted by expert have few runs: no expert without pairs has a tile.
//
// Kernel: gather_table. Grid: 1. Threadgroup: 1024 x 1 x 1.
// Bindings: rhs [pairs], table [entries] of (expert, first pair), params (GatherTableParams).
// Entries past the last tile have first pair `pairs`, so the pairs of tile i are those from
// table[i].y to table[i + 1].y.
//
// A simdgroup has a part of the pairs, and passes over it three times:
//   last run of this part
//   tiles of this part            (its first run may have started in an earlier part)
//   table entries of this part
#include <metal_stdlib>

#include "metal/common/kernel.h"
#include "metal/common/unroll.h"
#include "metal/gather_matmul/pair_tile.h"

// The runs among 32 adjacent pairs, one of a lane each.
struct Runs {
  uint starts;  // a bit for each lane whose pair starts a run
  int expert;   // of the lane's pair

  METAL_FUNC bool any() const thread { return starts != 0; }
  METAL_FUNC int last(int first) const thread { return first + 31 - int(metal::clz(starts)); }

  // Whether the lane's pair starts a tile. `run` is where the run before the first pair started.
  METAL_FUNC bool starts_tile(int first,
                              int run,
                              uint lane,
                              constant GatherTableParams& params) const thread {
    const uint up_to_lane = starts & (0xffffffffu >> (31 - lane));
    const int own = up_to_lane != 0 ? first + 31 - int(metal::clz(up_to_lane)) : run;
    const int pair = first + int(lane);
    return pair < params.pairs && ((pair - own) & (params.rows - 1)) == 0;
  }
};

METAL_FUNC Runs runs_at(const device int* rhs,
                        int first,
                        uint lane,
                        constant GatherTableParams& params) {
  const int pair = first + int(lane), last = params.pairs - 1;
  const int expert = matrix_of(rhs[metal::min(pair, last)], params.experts);
  const int before = matrix_of(rhs[metal::clamp(pair - 1, 0, last)], params.experts);
  const bool is_start = pair == 0 || (pair <= last && expert != before);
  return {uint(static_cast<ulong>(metal::simd_ballot(is_start))), expert};
}

template <int kThreads>
[[kernel, max_total_threads_per_threadgroup(kThreads)]] void gather_table(
    const device int* rhs [[buffer(0)]],
    device int2* table [[buffer(1)]],
    constant GatherTableParams& params [[buffer(2)]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  enum { kParts = kThreads / 32 };
  static_assert(int(kParts) == 32, "a part for each lane");
  threadgroup int last_runs[kParts], tiles_of_parts[kParts];
  const int steps = (params.pairs + kThreads - 1) / kThreads;
  const int begin = 32 * steps * int(simdgroup);
  const int end = metal::min(begin + 32 * steps, params.pairs);

  int last_run = -1;
  MLX_ANVIL_NO_UNROLL
  for (int first = begin; first < end; first += 32) {
    const Runs runs = runs_at(rhs, first, lane, params);
    last_run = runs.any() ? runs.last(first) : last_run;
  }
  if (lane == 0) {
    last_runs[simdgroup] = last_run;
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  const int run_before = metal::simd_max(lane < simdgroup ? metal::max(0, last_runs[lane]) : 0);

  int count = 0, run = run_before;
  MLX_ANVIL_NO_UNROLL
  for (int first = begin; first < end; first += 32) {
    const Runs runs = runs_at(rhs, first, lane, params);
    count += runs.starts_tile(first, run, lane, params) ? 1 : 0;
    run = runs.any() ? runs.last(first) : run;
  }
  count = metal::simd_sum(count);
  if (lane == 0) {
    tiles_of_parts[simdgroup] = count;
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  int next = metal::simd_sum(lane < simdgroup ? tiles_of_parts[lane] : 0);
  const int all = metal::simd_sum(tiles_of_parts[lane]);

  run = run_before;
  MLX_ANVIL_NO_UNROLL
  for (int first = begin; first < end; first += 32) {
    const Runs runs = runs_at(rhs, first, lane, params);
    const bool starts = runs.starts_tile(first, run, lane, params);
    const int through = metal::simd_prefix_inclusive_sum(starts ? 1 : 0);
    if (starts) {
      table[next + through - 1] = int2(runs.expert, first + int(lane));
    }
    next += metal::simd_shuffle(through, ushort(31));
    run = runs.any() ? runs.last(first) : run;
  }
  MLX_ANVIL_NO_UNROLL
  for (int i = all + int(thread_index); i < params.entries; i += kThreads) {
    table[i] = int2(0, params.pairs);
  }
}

// ---- kernels

MLX_ANVIL_KERNEL("gather_table", gather_table<1024>)

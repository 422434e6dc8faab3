// Shared parts of the norm kernels: how threads divide a row, reduce over it, and load its packs.
//
// A team of threads processes a row. It is one of the simdgroups of a threadgroup, or all of its
// threads. A thread keeps kPacks packs in registers. That covers a row unless it is long; a long
// row is loaded again in every pass.
//
// Sums of products use explicit fma. Otherwise contraction could differ between specialisations,
// and the bits of a result would depend on the layout of its operands.
#pragma once

#include "metal/common/resident.h"
#include "metal/common/strided_pack.h"
#include "metal/norm/params.h"

constant bool row_is_shared [[function_constant(1)]];  // the whole threadgroup processes one row
constant bool row_is_long [[function_constant(2)]];
constant bool has_residual [[function_constant(3)]];
constant bool has_gate [[function_constant(4)]];
constant bool has_weight [[function_constant(5)]];
constant bool has_bias [[function_constant(6)]];
constant bool row_is_short [[function_constant(10)]];     // half of a thread's packs cover it
constant bool packs_are_whole [[function_constant(11)]];  // full or empty, and aligned
constant bool registers_are_few [[function_constant(12)]];

// The host defines the same values.
enum { kSimdgroupThreads = 32, kMostSimdgroups = 16, kHeldElements = 16 };
enum { kMostThreads = kSimdgroupThreads * kMostSimdgroups };

// Elements of one thread, in registers.
template <typename T>
struct Held {
  enum { kSize = Pack<T>::kSize, kPacks = kHeldElements / kSize };
  float x[kPacks][kSize];

  // A constant of the pipeline: packs that no row reaches take neither registers nor instructions.
  static METAL_FUNC bool uses(int pack) { return !row_is_short || pack < kPacks / 2; }
};

// load_pack and store_pack for elements of a row. If packs are whole, there is no path for single
// elements, whose addresses would take registers. An empty pack may have a count below 0.
template <typename T>
METAL_FUNC void load_of_row(const device T* from, long stride, int count, thread float* x) {
  if (!packs_are_whole) {
    load_pack<T>(from, stride, count, x);
  } else if (count > 0) {
    Pack<T>::load(from, x);
  } else {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < Pack<T>::kSize; ++i) {
      x[i] = 0.0f;
    }
  }
}

template <typename T>
METAL_FUNC void store_of_row(device T* to, int count, const thread float* x) {
  if (!packs_are_whole) {
    store_pack<T>(to, count, x);
  } else if (count > 0) {
    Pack<T>::store(to, x);
  }
}

// A thread's team, and its position there.
struct Team {
  uint index;
  uint member;
  uint threads;
  uint simdgroup;
  uint lane;
};

METAL_FUNC Team team_of(uint3 group, uint3 groups, uint threads, uint simdgroup, uint lane) {
  const uint threadgroup_index = group.y * groups.x + group.x;
  const uint simdgroups = threads / kSimdgroupThreads;
  Team team;
  team.simdgroup = simdgroup;
  team.lane = lane;
  team.index = row_is_shared ? threadgroup_index : threadgroup_index * simdgroups + simdgroup;
  team.member = row_is_shared ? simdgroup * kSimdgroupThreads + lane : lane;
  team.threads = row_is_shared ? threads : kSimdgroupThreads;
  return team;
}

// Reduces over a team with one barrier per call. Two buffers alternate: a thread writes to one only
// after the barrier of the other, by which time all threads have read it.
template <int kMostSums>
struct TeamSums {
  threadgroup float (*memory)[kMostSums][kMostSimdgroups];
  uint turn;

  // values[k] = sum of values[k] over all threads of the team
  template <int kSums>
  METAL_FUNC void sum(Team team, thread float (&values)[kSums]) thread {
    MLX_ANVIL_UNROLL
    for (int k = 0; k < kSums; ++k) {
      values[k] = metal::simd_sum(values[k]);
    }
    if (!row_is_shared) {
      return;
    }
    threadgroup float (&shares)[kMostSums][kMostSimdgroups] = memory[turn];
    turn ^= 1;
    if (team.lane == 0) {
      MLX_ANVIL_UNROLL
      for (int k = 0; k < kSums; ++k) {
        shares[k][team.simdgroup] = values[k];
      }
    }
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    const uint simdgroups = team.threads / kSimdgroupThreads;
    MLX_ANVIL_UNROLL
    for (int k = 0; k < kSums; ++k) {
      values[k] = metal::simd_sum(team.lane < simdgroups ? shares[k][team.lane] : 0.0f);
    }
  }
};

// Columns of a thread's packs, in the section of a row that starts at `first`.
template <typename T>
struct Columns {
  Team team;
  int columns;
  int first;

  METAL_FUNC int of(int pack) const thread {
    return first + (pack * team.threads + team.member) * Held<T>::kSize;
  }
  // Valid elements of a pack: fewer than kSize, or none, past the end of the row.
  METAL_FUNC int count(int pack) const thread {
    return metal::min(int(Held<T>::kSize), columns - of(pack));
  }
  METAL_FUNC bool more() const thread { return first < columns; }
  METAL_FUNC void advance() thread { first += team.threads * kHeldElements; }
};

template <typename T>
METAL_FUNC Columns<T> columns_of(Team team, int columns) {
  Columns<T> place;
  place.team = team;
  place.columns = columns;
  place.first = 0;
  return place;
}

// Reads zeros past the end of the row.
template <typename T>
METAL_FUNC void load_held(const device T* row, long stride, Columns<T> at, thread Held<T>& held) {
  MLX_ANVIL_UNROLL
  for (int j = 0; j < Held<T>::kPacks; ++j) {
    if (Held<T>::uses(j)) {
      load_of_row<T>(row + at.of(j) * stride, stride, at.count(j), held.x[j]);
    }
  }
}

// Loads one pack of a weight or bias of type W for rows of type T.
template <typename T, typename W>
METAL_FUNC void load_vector(const device W* vector,
                            constant NormRowParams& rows,
                            uint group,
                            Columns<T> at,
                            int pack,
                            thread float* x) {
  const device W* const from =
      vector + norm_row_offset(&rows, group) + at.of(pack) * rows.column_stride;
  MLX_ANVIL_UNROLL
  for (int i = 0; i < Held<T>::kSize; i += Pack<W>::kSize) {
    load_of_row<W>(from + i * rows.column_stride, rows.column_stride,
                   metal::min(int(Pack<W>::kSize), at.count(pack) - i), x + i);
  }
}

// Loads the factor of each column: weight plus weight_offset, or 1 without a weight.
template <typename T, typename W>
METAL_FUNC void load_weight(const device W* weight,
                            constant NormParams& params,
                            uint row,
                            Columns<T> at,
                            int pack,
                            thread float* x) {
  if (has_weight) {
    load_vector<T, W>(weight, params.weight, row / params.rows_per_group, at, pack, x);
  }
  MLX_ANVIL_UNROLL
  for (int i = 0; i < Held<T>::kSize; ++i) {
    x[i] = has_weight ? params.weight_offset + x[i] : 1.0f;
  }
}

template <typename T>
METAL_FUNC float sum_of(const thread Held<T>& held) {
  float sum = 0.0f;
  MLX_ANVIL_UNROLL
  for (int k = 0; k < kHeldElements; ++k) {
    const int j = k / Held<T>::kSize;
    sum += Held<T>::uses(j) ? held.x[j][k % Held<T>::kSize] : 0.0f;
  }
  return sum;
}

// Subtracts the mean from the row's elements, and leaves the zeros past its end.
template <typename T>
METAL_FUNC void subtract_mean(float mean, Columns<T> at, thread Held<T>& held) {
  MLX_ANVIL_UNROLL
  for (int k = 0; k < kHeldElements; ++k) {
    const int j = k / Held<T>::kSize, i = k % Held<T>::kSize;
    held.x[j][i] = Held<T>::uses(j) && i < at.count(j) ? held.x[j][i] - mean : 0.0f;
  }
}

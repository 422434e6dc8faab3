// What the norm kernels share: how threads share a row, its sums, and its packs.
//
// A team of threads takes a row: a SIMD group, of which a threadgroup has several, or a whole
// threadgroup. A thread's packs are kPacks at a time in registers, which is all of a row that is
// not long; a long row is read again for every pass over it.
//
// Sums of products are written as fma: a compiler that fuses some of them, and others in another
// specialisation, would let the bits of a result depend on where its operands lie.
#pragma once

#include "metal/common/strided_pack.h"
#include "metal/norm/params.h"

constant bool row_is_shared [[function_constant(1)]];  // by the SIMD groups of a threadgroup
constant bool row_is_long [[function_constant(2)]];
constant bool has_residual [[function_constant(3)]];
constant bool has_gate [[function_constant(4)]];
constant bool has_weight [[function_constant(5)]];
constant bool has_bias [[function_constant(6)]];

// The host knows all of them.
enum { kSimdgroupThreads = 32, kMostSimdgroups = 16, kHeldElements = 16 };
enum { kMostThreads = kSimdgroupThreads * kMostSimdgroups };

// Elements of one thread, in registers.
template <typename T>
struct Held {
  enum { kSize = Pack<T>::kSize, kPacks = kHeldElements / kSize };
  float x[kPacks][kSize];
};

// Of a thread: its team, and which of its members it is.
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

// Sums over a team, one barrier each. Two blocks of memory take turns: when a thread writes into
// one of them, the barrier of the other has shown that everybody has read it.
template <int kMostSums>
struct TeamSums {
  threadgroup float (*memory)[kMostSums][kMostSimdgroups];
  uint turn;

  // values[k] = the sum of values[k] over all threads of the team
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

// The columns of a thread's packs in the part of a row that begins at `first`.
template <typename T>
struct Columns {
  Team team;
  int columns;
  int first;

  METAL_FUNC int of(int pack) const thread {
    return first + (pack * team.threads + team.member) * Held<T>::kSize;
  }
  // Elements of a pack that the row has; none or less beyond its end.
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

// Zeros beyond the end of the row.
template <typename T>
METAL_FUNC void load_held(const device T* row, long stride, Columns<T> at, thread Held<T>& held) {
  MLX_ANVIL_UNROLL
  for (int j = 0; j < Held<T>::kPacks; ++j) {
    load_pack<T>(row + at.of(j) * stride, stride, at.count(j), held.x[j]);
  }
}

// One pack of a weight or a bias of type W, for rows of T.
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
    load_pack<W>(from + i * rows.column_stride, rows.column_stride,
                 metal::min(int(Pack<W>::kSize), at.count(pack) - i), x + i);
  }
}

// The weight as it multiplies, offset included; ones where there is none.
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
    sum += held.x[k / Held<T>::kSize][k % Held<T>::kSize];
  }
  return sum;
}

// Takes the mean off, but not off the zeros beyond the end of the row.
template <typename T>
METAL_FUNC void subtract_mean(float mean, Columns<T> at, thread Held<T>& held) {
  MLX_ANVIL_UNROLL
  for (int k = 0; k < kHeldElements; ++k) {
    const int j = k / Held<T>::kSize, i = k % Held<T>::kSize;
    held.x[j][i] = i < at.count(j) ? held.x[j][i] - mean : 0.0f;
  }
}

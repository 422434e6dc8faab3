// Shared parts of the norm kernels: how threads divide a row, reduce over it, and load its packs.
//
// A team of threads processes a row. It is one of the simdgroups of a threadgroup, or all of its
// threads. A thread keeps kPacks packs in registers. That covers a row unless it is long; a long
// row is loaded again in every pass.
//
// Sums of products use explicit fma. Otherwise contraction could differ between specialisations,
// and the bits of a result would depend on the layout of its operands.
#pragma once

#include "metal/common/activation.h"
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
constant bool reads_ahead [[function_constant(13)]];  // only if packs are whole, and no row is long
constant bool row_is_full [[function_constant(14)]];  // it fills the packs in use of all threads

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

// Distance of neighbouring columns. Whole packs are dense.
METAL_FUNC long column_stride_of(constant NormRowParams& rows) {
  return packs_are_whole ? 1 : rows.column_stride;
}

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

// Sums of several values over a SIMD group. As vectors they take fewer exchanges where the hardware
// has no sum.
METAL_FUNC void sum_over_simdgroup(thread float (&values)[1]) {
  values[0] = metal::simd_sum(values[0]);
}
METAL_FUNC void sum_over_simdgroup(thread float (&values)[2]) {
  const float2 sums = metal::simd_sum(float2(values[0], values[1]));
  values[0] = sums.x;
  values[1] = sums.y;
}
METAL_FUNC void sum_over_simdgroup(thread float (&values)[4]) {
  const float4 sums = metal::simd_sum(float4(values[0], values[1], values[2], values[3]));
  MLX_ANVIL_UNROLL
  for (int k = 0; k < 4; ++k) {
    values[k] = sums[k];
  }
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
    sum_over_simdgroup(values);
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
      values[k] = team.lane < simdgroups ? shares[k][team.lane] : 0.0f;
    }
    sum_over_simdgroup(values);
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
    return row_is_full ? int(Held<T>::kSize) : metal::min(int(Held<T>::kSize), columns - of(pack));
  }
  // Moves to the next section of a long row, if there is one. Registers cover any other row.
  METAL_FUNC bool next() thread {
    first += team.threads * kHeldElements;
    return row_is_long && first < columns;
  }
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
METAL_FUNC void load_vector(
    const device W* vector, long stride, Columns<T> at, int pack, thread float* x) {
  const device W* const from = vector + at.of(pack) * stride;
  MLX_ANVIL_UNROLL
  for (int i = 0; i < Held<T>::kSize; i += Pack<W>::kSize) {
    load_of_row<W>(from + i * stride, stride, metal::min(int(Pack<W>::kSize), at.count(pack) - i),
                   x + i);
  }
}

// A thread's packs as they lie in memory, of element type W for rows of type T. Packs must be
// whole. 16-bit elements take half the registers that they do once they are widened.
template <typename T, typename W>
struct Stored {
  enum { kParts = Held<T>::kSize / Pack<W>::kSize };
  using Raw = typename Pack<W>::Raw;
  Raw packs[Held<T>::kPacks][kParts];

  METAL_FUNC void read(const device W* row, Columns<T> at) thread {
    MLX_ANVIL_UNROLL
    for (int k = 0; k < Held<T>::kPacks * kParts; ++k) {
      const int j = k / kParts, part = k % kParts * Pack<W>::kSize;
      if (Held<T>::uses(j)) {
        const Raw zeros = {};
        packs[j][k % kParts] = part < at.count(j) ? Pack<W>::read(row + at.of(j) + part) : zeros;
      }
    }
  }
  METAL_FUNC void widen(int pack, thread float* x) const thread {
    MLX_ANVIL_UNROLL
    for (int part = 0; part < kParts; ++part) {
      Pack<W>::widen(packs[pack][part], x + part * Pack<W>::kSize);
    }
  }
  METAL_FUNC void widen(thread Held<T>& held) const thread {
    MLX_ANVIL_UNROLL
    for (int j = 0; j < Held<T>::kPacks && Held<T>::uses(j); ++j) {
      widen(j, held.x[j]);
    }
  }
};

// What a gate multiplies by, and its slope.
METAL_FUNC float gate_value(float gate, constant NormParams& params) {
  const float s = sigmoid(gate).value;
  return params.gate_is_sigmoid ? s : gate * s;
}
METAL_FUNC float gate_slope(float gate, constant NormParams& params) {
  const Sigmoid s = sigmoid(gate);
  return params.gate_is_sigmoid ? s.value * s.complement : silu_derivative(gate, s);
}

// The group of rows that share a weight and a bias. Most calls have one group.
METAL_FUNC uint group_of(uint row, constant NormParams& params) {
  return params.rows_per_group == params.rows ? 0 : row / params.rows_per_group;
}

// Loads the factor of each column: weight plus weight_offset, or 1 without a weight. What was read
// ahead is in x.
template <typename T, typename W>
METAL_FUNC void load_weight(
    const device W* weight, constant NormParams& params, Columns<T> at, int pack, thread float* x) {
  if (has_weight && !reads_ahead) {
    load_vector<T, W>(weight, column_stride_of(params.weight), at, pack, x);
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
    if (Held<T>::uses(j)) {
      sum += held.x[j][k % Held<T>::kSize];
    }
  }
  return sum;
}

// Subtracts the mean from the row's elements, and leaves the zeros past its end.
template <typename T>
METAL_FUNC void subtract_mean(float mean, Columns<T> at, thread Held<T>& held) {
  MLX_ANVIL_UNROLL
  for (int j = 0; j < Held<T>::kPacks && Held<T>::uses(j); ++j) {
    const int count = at.count(j);
    const float of_whole = count > 0 ? mean : 0.0f;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < Held<T>::kSize; ++i) {
      held.x[j][i] -= packs_are_whole ? of_whole : i < count ? mean : 0.0f;
    }
  }
}

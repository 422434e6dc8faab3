// Products of up to 8 rows of x with rows of w of 4-bit codes, by matrix products of 16-bit
// numbers: for GPUs that have units for these, on which eight rows of x cost little more than one.
//
// The columns of a fragment are dealt so that a lane's two elements are codes i and i + 4 of one
// word, which one mask gives, and that a group is whole fragments. So groups are summed up before
// their scale is applied, and all rows of x take the same steps, however many there are. A lane
// reads words of w and the columns of x that belong to them, and exchanges neither.
//
// The SIMD groups of a threadgroup share the columns of its rows of w. What one needs of them for
// its next step comes into threadgroup memory while it computes with what is there: that hides what
// memory takes, and costs no registers.
#pragma once

#include "metal/common/tile.h"
#include "metal/quantized_matmul/gemv_stage.h"

// What a code is as a 16-bit number: with these bits around it, (code + kOffset) / factor().
template <typename T>
struct SmallCode;

// A subnormal number is an integer times 2^-24.
template <>
struct SmallCode<half> {
  enum { kBits = 0, kOffset = 0 };
  METAL_FUNC static float factor() { return 0x1p24f; }
};

// Too few bits of range for that: from 128 to 255, neighbours are one apart.
template <>
struct SmallCode<bfloat> {
  enum { kBits = 0x43004300, kOffset = 128 };
  METAL_FUNC static float factor() { return 1.0f; }
};

template <typename T, int kGroup, int kFragments>
struct GemvMatrixSums {
  // kWords: a lane's of a group.
  enum { kGroups = kMatrixColumns / kGroup, kWords = kGroup / 32 };
  using Stage = MatrixStage<T, kGroup, kFragments>;

  FragmentPlace place;
  // Of w's row place.row of each fragment and x's rows place.column and place.column + 1.
  float2 totals[kFragments];

  METAL_FUNC void clear() thread {
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      totals[f] = float2(0.0f);
    }
  }

  // Adds every so many times 256 columns as there are SIMD groups. `x`: row place.row, or any where
  // there is none, whose sums are nobody's. `stages`: two, of this SIMD group.
  METAL_FUNC void add(const thread FragmentRows<T> (&rows)[kFragments],
                      const device T* x,
                      int columns,
                      int simdgroup,
                      int lane,
                      threadgroup uint4* stages) thread {
    // Plus a zero that only run time knows: as PTX, constants are moved into registers anew for
    // every product.
    const uint zero = uint(columns) >> 31;
    const uint mask = 0x000f000fu;  // as only operand it is part of the instruction
    const Constants constants = {metal::as_type<uint>(Pair<T>(T(1), T(1))) + zero,
                                 SmallCode<T>::kBits == 0 ? mask : mask + zero};
    const StageCopies<T, kGroup, kFragments> copies(rows, lane);
    const int steps = columns / kMatrixColumns;
    if (simdgroup < steps) {
      copies.start(simdgroup, stages);
    }
    end_copies();
    int current = 0;
    for (int step = simdgroup; step < steps; step += kMatrixSimdgroups) {
      threadgroup uint4* next = stages + (current ^ 1) * Stage::kCount;
      if (step + kMatrixSimdgroups < steps) {
        copies.start(step + kMatrixSimdgroups, next);
      }
      end_copies();
      wait_for_copies<1>();
      metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
      add_step(stages + current * Stage::kCount, x + step * kMatrixColumns, constants);
      metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
      current ^= 1;
    }
  }

 private:
  struct Constants {
    uint ones;   // two numbers
    uint codes;  // a mask of two
  };

  METAL_FUNC void add_step(threadgroup uint4* stage,
                           const device T* x,
                           Constants constants) thread {
    using Factors = typename Stage::Factors;
    Factors factors[kFragments][2 * Stage::kFactorVectors];
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      MLX_ANVIL_UNROLL
      for (int i = 0; i < 2 * Stage::kFactorVectors; ++i) {
        factors[f][i] = Stage::factors(stage, 8 * f + place.row)[i];
      }
    }
    MLX_ANVIL_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      const int word = g * (kGroup / 8) + place.column / 2 * kWords;
      uint words[kFragments][kWords];
      T scales[kFragments], biases[kFragments];
      MLX_ANVIL_UNROLL
      for (int f = 0; f < kFragments; ++f) {
        load_staged(Stage::words(stage, 8 * f + place.row, word), words[f]);
        const int vector = g / Stage::kFactorSize, i = g % Stage::kFactorSize;
        scales[f] = factors[f][vector][i];
        biases[f] = factors[f][Stage::kFactorVectors + vector][i];
      }
      uint4 elements[kWords];
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kWords; ++i) {
        elements[i] = reinterpret_cast<const device uint4*>(x)[word + i];
      }
      add_group(words, scales, biases, elements, constants);
    }
  }

  METAL_FUNC static void load_staged(const threadgroup uint* from, thread uint (&words)[kWords]) {
    using Words = metal::vec<uint, kWords == 1 ? 2 : int(kWords)>;
    if (kWords == 1) {
      words[0] = from[0];
      return;
    }
    const Words vector = *reinterpret_cast<const threadgroup Words*>(from);
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kWords; ++i) {
      words[i] = vector[i];
    }
  }

  METAL_FUNC void add_group(const thread uint (&words)[kFragments][kWords],
                            const thread T (&scales)[kFragments],
                            const thread T (&biases)[kFragments],
                            const thread uint4 (&elements)[kWords],
                            Constants constants) thread {
    const Pair<T> two_ones = metal::as_type<Pair<T>>(constants.ones);
    const Fragment<T> ones = fragment_of<T>(two_ones.x, two_ones.y);
    Fragment<float> x_sums = fragment_of<float>(0.0f, 0.0f);
    Fragment<float> sums[kFragments];
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      sums[f] = x_sums;
    }
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 4 * kWords; ++i) {
      const int word = i / 4, code = i % 4;
      const Fragment<T> x = transposed(columns_of_codes(elements[word], code), place);
      MLX_ANVIL_UNROLL
      for (int f = 0; f < kFragments; ++f) {
        const uint codes = words[f][word] >> (4 * code) & constants.codes;
        const Pair<T> pair = metal::as_type<Pair<T>>(codes | uint(SmallCode<T>::kBits));
        metal::simdgroup_multiply_accumulate(sums[f], fragment_of<T>(pair.x, pair.y), x, sums[f]);
      }
      metal::simdgroup_multiply_accumulate(x_sums, ones, x, x_sums);
    }
    const float2 of_x = elements_of(x_sums);
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      float2 of_codes = elements_of(sums[f]);
      if (SmallCode<T>::kOffset != 0) {
        of_codes = metal::fma(float2(-float(SmallCode<T>::kOffset)), of_x, of_codes);
      }
      const float2 scale = float2(SmallCode<T>::factor() * static_cast<float>(scales[f]));
      const float2 bias = float2(static_cast<float>(biases[f]));
      totals[f] = metal::fma(scale, of_codes, metal::fma(bias, of_x, totals[f]));
    }
  }

  // Elements `code` and `code + 4` of eight neighbours.
  METAL_FUNC static Fragment<T> columns_of_codes(uint4 eight, int code) {
    const Pair<T> low = metal::as_type<Pair<T>>(eight[code / 2]);
    const Pair<T> high = metal::as_type<Pair<T>>(eight[code / 2 + 2]);
    return fragment_of<T>(low[code % 2], high[code % 2]);
  }
};

// Totals of the lane, over all SIMD groups.
template <typename T, int kGroup, int kFragments>
METAL_FUNC void add_shares(thread GemvMatrixSums<T, kGroup, kFragments>& sums,
                           threadgroup float2 (*shares)[kFragments][32],
                           uint simdgroup,
                           uint lane) {
  MLX_ANVIL_UNROLL
  for (int f = 0; f < kFragments; ++f) {
    shares[simdgroup][f][lane] = sums.totals[f];
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  sums.clear();
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kMatrixSimdgroups; ++i) {
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      sums.totals[f] += shares[i][f][lane];
    }
  }
}

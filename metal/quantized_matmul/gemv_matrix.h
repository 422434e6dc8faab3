// Products of up to 8 rows of x with rows of w of 4-bit codes, by matrix products of 16-bit
// numbers: for GPUs that have units for these, on which eight rows of x cost no more than one.
//
// The columns of a fragment are dealt so that a lane's two elements are codes i and i + 4 of one
// word, which one mask gives, and that a group is whole fragments. So groups are summed up before
// their scale is applied, and all rows of x take the same steps, however many there are. A lane
// reads words of w and the columns of x that belong to them, and exchanges neither.
//
// The SIMD groups of a threadgroup share the columns of its rows of w, kFragments times 8 of them.
// Few rows leave registers for more threadgroups at a time, which hides more of what memory takes
// than loads of the next columns under way would; many share the work on x.
#pragma once

#include "metal/common/tile.h"
#include "metal/quantized_matmul/dequant.h"

enum { kMatrixSimdgroups = 4, kMatrixThreads = 32 * kMatrixSimdgroups };
// Of a threadgroup: rows of x. Of a SIMD group: columns at a time, of which K is a multiple.
enum { kMatrixRows = 8, kMatrixColumns = 256 };
// So many threads have to fit into registers, to bound how many a thread takes.
enum { kMatrixThreadsOfRegisters = 4 * kMatrixThreads };

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
  using Row = WeightRow<T, AffineFormat<4>>;

  FragmentPlace place;
  // Of w's row place.row of each fragment and x's rows place.column and place.column + 1.
  float2 totals[kFragments];

  METAL_FUNC void clear() thread {
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      totals[f] = float2(0.0f);
    }
  }

  // Adds every so many times 256 columns as there are SIMD groups. `rows`: the lane's, of each
  // fragment; `x`: row place.row, or any where there is none, whose sums are nobody's.
  METAL_FUNC void add(const thread Row (&rows)[kFragments],
                      const device T* x,
                      uint columns,
                      uint simdgroup) thread {
    // Plus a zero that only run time knows: as PTX, constants are moved into registers anew for
    // every product.
    const uint zero = columns >> 31;
    const uint mask = 0x000f000fu;  // as only operand it is part of the instruction
    const Constants constants = {metal::as_type<uint>(Pair<T>(T(1), T(1))) + zero,
                                 SmallCode<T>::kBits == 0 ? mask : mask + zero};
    const uint own_word = place.column / 2 * kWords;
    for (uint begin = simdgroup * kMatrixColumns; begin < columns;
         begin += kMatrixSimdgroups * kMatrixColumns) {
      // One offset for all loads of a row: what is added to it is known when code is generated.
      const uint word = begin / 8 + own_word, group = begin / kGroup;
      uint words[kFragments][kGroups][kWords];
      T scales[kFragments][kGroups], biases[kFragments][kGroups];
      MLX_ANVIL_UNROLL
      for (int f = 0; f < kFragments; ++f) {
        MLX_ANVIL_UNROLL
        for (int g = 0; g < kGroups; ++g) {
          load_words<kWords>(rows[f].words + word + g * (kGroup / 8), words[f][g]);
        }
        load_factors(rows[f].scales + group, scales[f]);
        load_factors(rows[f].biases + group, biases[f]);
      }
      uint4 elements[kGroups][kWords];
      MLX_ANVIL_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        MLX_ANVIL_UNROLL
        for (int i = 0; i < kWords; ++i) {
          const device T* from = x + 8 * word + (g * kGroup + 8 * i);
          elements[g][i] = *reinterpret_cast<const device uint4*>(from);
        }
      }
      MLX_ANVIL_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        add_group(g, words, scales, biases, elements[g], constants);
      }
    }
  }

 private:
  // Of all groups of a step, together: rows of x make no steps that would leave them unaligned.
  METAL_FUNC static void load_factors(const device T* from, thread T (&to)[kGroups]) {
    using Vector = metal::vec < T, kGroups<4 ? int(kGroups) : 4>;
    enum { kSize = kGroups < 4 ? int(kGroups) : 4 };
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kGroups; i += kSize) {
      const Vector vector = *reinterpret_cast<const device Vector*>(from + i);
      MLX_ANVIL_UNROLL
      for (int j = 0; j < kSize; ++j) {
        to[i + j] = vector[j];
      }
    }
  }

  struct Constants {
    uint ones;   // two numbers
    uint codes;  // a mask of two
  };

  METAL_FUNC void add_group(int g,
                            const thread uint (&words)[kFragments][kGroups][kWords],
                            const thread T (&scales)[kFragments][kGroups],
                            const thread T (&biases)[kFragments][kGroups],
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
        const uint codes = words[f][g][word] >> (4 * code) & constants.codes;
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
      const float2 scale = float2(SmallCode<T>::factor() * static_cast<float>(scales[f][g]));
      const float2 bias = float2(static_cast<float>(biases[f][g]));
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

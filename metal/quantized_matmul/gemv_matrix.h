// Products of up to 8 rows of x with rows of w of 4-bit codes, by matrix products of 16-bit
// numbers: for GPUs that have units for these, on which eight rows of x cost no more than one.
//
// The columns of a fragment are dealt so that a lane's two elements are codes i and i + 4 of one
// word, which one mask gives, and that a group is whole fragments. So groups are summed up before
// their scale is applied, and all rows of x take the same steps, however many there are. A lane
// reads words of w and the columns of x that belong to them, and exchanges neither.
#pragma once

#include "metal/common/tile.h"
#include "metal/quantized_matmul/dequant.h"
#include "metal/quantized_matmul/gemv.h"

enum { kMatrixSimdgroups = 4, kMatrixThreads = 32 * kMatrixSimdgroups };
// Of a SIMD group: fragments of rows of w, and columns at a time. K is a multiple of these.
enum { kMatrixFragments = 4, kMatrixColumns = 256 };
enum { kMatrixOutputs = 8 * kMatrixFragments };

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

template <typename T, int kGroup>
struct GemvMatrixSums {
  // kWords: a lane's of a group.
  enum { kGroups = kMatrixColumns / kGroup, kWords = kGroup / 32 };
  using Row = WeightRow<T, AffineFormat<4>>;

  FragmentPlace place;
  // Of w's row place.row of each fragment and x's rows place.column and place.column + 1.
  float2 totals[kMatrixFragments];

  METAL_FUNC void clear() thread {
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kMatrixFragments; ++f) {
      totals[f] = float2(0.0f);
    }
  }

  // Adds every step-th 256 columns. `rows`: the lane's, of each fragment; `x`: row place.row, or
  // any where there is none, whose sums are nobody's.
  METAL_FUNC void add(const thread Row (&rows)[kMatrixFragments],
                      const device T* x,
                      int columns,
                      int first,
                      int step) thread {
    for (int begin = first * kMatrixColumns; begin < columns; begin += step * kMatrixColumns) {
      uint words[kMatrixFragments][kGroups][kWords];
      T scales[kMatrixFragments][kGroups], biases[kMatrixFragments][kGroups];
      MLX_ANVIL_UNROLL
      for (int f = 0; f < kMatrixFragments; ++f) {
        MLX_ANVIL_UNROLL
        for (int g = 0; g < kGroups; ++g) {
          const int word = (begin + g * kGroup) / 8 + place.column / 2 * kWords;
          load_words<kWords>(rows[f].words + word, words[f][g]);
        }
        load_factors(rows[f].scales + begin / kGroup, scales[f]);
        load_factors(rows[f].biases + begin / kGroup, biases[f]);
      }
      uint4 elements[kGroups][kWords];
      MLX_ANVIL_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        MLX_ANVIL_UNROLL
        for (int i = 0; i < kWords; ++i) {
          const int column = begin + g * kGroup + 8 * (place.column / 2 * kWords + i);
          elements[g][i] = *reinterpret_cast<const device uint4*>(x + column);
        }
      }
      MLX_ANVIL_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        add_group(g, words, scales, biases, elements[g]);
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

  METAL_FUNC void add_group(int g,
                            const thread uint (&words)[kMatrixFragments][kGroups][kWords],
                            const thread T (&scales)[kMatrixFragments][kGroups],
                            const thread T (&biases)[kMatrixFragments][kGroups],
                            const thread uint4 (&elements)[kWords]) thread {
    const Fragment<T> ones = fragment_of<T>(T(1), T(1));
    Fragment<float> x_sums = fragment_of<float>(0.0f, 0.0f);
    Fragment<float> sums[kMatrixFragments];
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kMatrixFragments; ++f) {
      sums[f] = x_sums;
    }
    MLX_ANVIL_UNROLL
    for (int i = 0; i < 4 * kWords; ++i) {
      const int word = i / 4, code = i % 4;
      const Fragment<T> x = transposed(columns_of_codes(elements[word], code), place);
      MLX_ANVIL_UNROLL
      for (int f = 0; f < kMatrixFragments; ++f) {
        const uint codes = words[f][g][word] >> (4 * code) & 0x000f000fu;
        const Pair<T> pair = metal::as_type<Pair<T>>(codes | uint(SmallCode<T>::kBits));
        metal::simdgroup_multiply_accumulate(sums[f], fragment_of<T>(pair.x, pair.y), x, sums[f]);
      }
      metal::simdgroup_multiply_accumulate(x_sums, ones, x, x_sums);
    }
    const float2 of_x = elements_of(x_sums);
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kMatrixFragments; ++f) {
      const float2 of_codes =
          SmallCode<T>::factor() * elements_of(sums[f]) - float(SmallCode<T>::kOffset) * of_x;
      totals[f] +=
          static_cast<float>(scales[f][g]) * of_codes + static_cast<float>(biases[f][g]) * of_x;
    }
  }

  // Elements `code` and `code + 4` of eight neighbours.
  METAL_FUNC static Fragment<T> columns_of_codes(uint4 eight, int code) {
    const Pair<T> low = metal::as_type<Pair<T>>(eight[code / 2]);
    const Pair<T> high = metal::as_type<Pair<T>>(eight[code / 2 + 2]);
    return fragment_of<T>(low[code % 2], high[code % 2]);
  }
};

// Totals of the lane, over all SIMD groups where these share columns; otherwise as they are.
template <typename T, int kGroup>
METAL_FUNC void add_shares(thread GemvMatrixSums<T, kGroup>& sums,
                           threadgroup float2 (*shares)[kMatrixFragments][32],
                           uint simdgroup,
                           uint lane) {
  if (!columns_are_shared) {
    return;
  }
  MLX_ANVIL_UNROLL
  for (int f = 0; f < kMatrixFragments; ++f) {
    shares[simdgroup][f][lane] = sums.totals[f];
  }
  threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  sums.clear();
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kMatrixSimdgroups; ++i) {
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kMatrixFragments; ++f) {
      sums.totals[f] += shares[i][f][lane];
    }
  }
}

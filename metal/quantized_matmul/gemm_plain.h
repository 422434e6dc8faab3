// Tiles of x W on matrix units of 16-bit types, for 9 and more rows of x: as gemm_matrix.h, but the
// rows of w lie along the sum.
//
// A lane unpacks pieces of four rows of w at a time. The pairs of adjacent columns in these become
// fragments of W^T, the left operand, when lanes transpose them. Their order of rows is that of the
// vectors of x: eight adjacent rows for each of the four lanes that share a row of x.
#pragma once

#include "metal/common/async_copy.h"
#include "metal/common/reg_tile.h"
#include "metal/quantized_matmul/gemm_codes.h"
#include "metal/quantized_matmul/lane_weights.h"

// Four simdgroups share the columns of a tile, 32 each. kAlong of them split the rows of w of a
// step, 128 each.
template <typename T, typename Format, int kRowFragments, int kAlong>
struct GemmPlainTile {
  enum { kRows = 8 * kRowFragments, kAcross = 4, kColumns = 32 * kAcross, kDepth = 128 * kAlong };
  enum { kFirst = kAcross, kSimdgroups = kAcross * kAlong, kThreads = 32 * kSimdgroups };
  enum { kBits = Format::kBits, kWords = kBits, kXVectors = kDepth / 8 };  // uint4 per row
  enum { kStride = kWords % 2 == 0 && kWords != 6 ? kWords : kWords | 1 };
  using Scale = typename Format::template Scale<T>;
  using Factors = GemmFactors<T, Format>;
  using Sums = RegTile<float, 32, kRows>;  // W^T x^T
  // Bytes of scales, and of biases, per row: those of the tile's columns, at least 4.
  enum { kFactorBytes = 4 * sizeof(Scale) < 8 && !metal::is_same_v<Format, Nvfp4Format> ? 4 : 8 };
  enum { kXBegin = kDepth * kStride, kFactorsBegin = kXBegin + kRows * kXVectors };
  enum { kStage = kFactorsBegin + kDepth * Factors::kArrays * kFactorBytes / 16 };

  const device uint4* words;  // of the first row, and the tile's first column
  const device uint4* x;
  const device Scale* scales;  // of the first row
  const device T* biases;
  uint row_words, row_x, row_groups;  // per row
  uint last_row;                      // of x
  uint column, depth;                 // first column; rows of w
  uint group_shift;
  uint across, along;
  uint copier, magic;
  FragmentPlace place;

  METAL_FUNC void start_copies(threadgroup uint4* stage, uint step) const thread {
    enum { kXCopies = kRows * kXVectors, kWordCopies = kDepth * kWords };
    MLX_ANVIL_UNROLL
    for (int j = 0; j < kWordCopies / kThreads; ++j) {
      const uint i = copier + j * kThreads, n = i / kWords, v = i % kWords;
      const uint row = metal::min(step * kDepth + n, depth - 1);
      start_copy(stage + n * kStride + swizzled(n, v), words + (ulong(row) * row_words + v));
    }
    MLX_ANVIL_UNROLL
    for (int j = 0; j < (kXCopies + kThreads - 1) / kThreads; ++j) {
      const uint i = copier + j * kThreads, row = i / kXVectors, v = i % kXVectors;
      const uint from = step * kXVectors + v;
      if (kXCopies % kThreads == 0 || i < kXCopies) {
        start_copy(stage + kXBegin + row * kXVectors + (v ^ row % 2 * 4),
                   x + (ulong(metal::min(row, last_row)) * row_x + (from < row_x ? from : 0)),
                   from < row_x);
      }
    }
    copy_factors(stage + kFactorsBegin, step);
  }

  // Adds the products with this simdgroup's rows of w, of which `left` are left for the
  // threadgroup.
  METAL_FUNC void add_products(const threadgroup uint4* stage,
                               uint left,
                               thread Sums& sums) const thread {
    const uint t = place.column / 2, r = place.row;
    MLX_ANVIL_NO_UNROLL
    for (uint block = 4 * along; block < 4 * along + 4; ++block) {
      Fragment<T> weights[4][4];  // of columns, of rows
      MLX_ANVIL_UNROLL
      for (int p = 0; p < 4; ++p) {
        const uint n = 32 * block + 8 * (r / 2) + 2 * p + r % 2;
        Factors factors;
        read_factors(stage, n, 4 * across + t, factors);
        if (!steps_are_whole && n >= left) {
          factors.clear();
        }
        uint pairs[4];
        gemm_weights(codes_of(stage + n * kStride, n, 4 * across + t), factors, magic, pairs);
        MLX_ANVIL_UNROLL
        for (int q = 0; q < 4; ++q) {
          weights[q][p] = transposed(fragment_of_pair<T>(pairs[q]), place);
        }
      }
      const threadgroup uint4* const xs =
          stage + kXBegin + r * kXVectors + ((4 * block + t) ^ r % 2 * 4);
      MLX_ANVIL_UNROLL
      for (int m = 0; m < kRowFragments; ++m) {
        multiply(weights, xs[8 * m * kXVectors], m, sums);
      }
    }
  }

 private:
  METAL_FUNC static uint swizzled(uint n, uint v) {
    return kWords == 4 ? v ^ n / 8 % 4 : kWords == 8 ? v ^ (n / 8 % 2 * 2 + n % 2 * 4) : v;
  }

  // First of the groups whose factors are staged: an even one if a row has just one 16-bit factor.
  METAL_FUNC uint first_group() const thread {
    const uint group = column >> group_shift;
    return (128u >> group_shift) * sizeof(Scale) < 4 ? group & ~1u : group;
  }

  METAL_FUNC void copy_factors(threadgroup uint4* to, uint step) const thread {
    enum { kArrays = Factors::kArrays };
    const uint bytes = metal::max(4u, (128u >> group_shift) * uint(sizeof(Scale)));
    const uint unit_bits = bytes == 8 ? 1 : 0, of_row = row_groups * sizeof(Scale);
    MLX_ANVIL_NO_UNROLL
    for (uint i = copier; i < kDepth * kArrays << unit_bits; i += kThreads) {
      const uint array = i >> unit_bits;
      const uint row = metal::min(step * kDepth + array / kArrays, depth - 1);
      const uint begin = first_group() * sizeof(Scale) + 4 * (i & ((1u << unit_bits) - 1));
      const device uchar* const from = array % kArrays == 0
                                           ? reinterpret_cast<const device uchar*>(scales)
                                           : reinterpret_cast<const device uchar*>(biases);
      start_copy(reinterpret_cast<threadgroup uint*>(to) + i,
                 reinterpret_cast<const device uint*>(from + (ulong(row) * of_row + begin)));
    }
  }

  // Those of row n and piece `piece` of the tile's columns.
  METAL_FUNC void read_factors(const threadgroup uint4* stage,
                               uint n,
                               uint piece,
                               thread Factors& factors) const thread {
    const uint bytes = metal::max(4u, (128u >> group_shift) * uint(sizeof(Scale)));
    const uint count = bytes / sizeof(Scale);
    const uint group = ((column + 8 * piece) >> group_shift) - first_group();
    factors.read(reinterpret_cast<const threadgroup Scale*>(stage + kFactorsBegin) +
                     (n * Factors::kArrays * count + group),
                 count);
  }

  METAL_FUNC static uint2 codes_of(const threadgroup uint4* row, uint n, uint piece) {
    using Piece = GemmPiece<kBits>;
    return Piece::load(row + swizzled(n, Piece::vector_of(piece)), piece);
  }

  // Adds W^T x^T for eight rows of x and 32 rows of w.
  METAL_FUNC void multiply(const thread Fragment<T> (&weights)[4][4],
                           uint4 eight,
                           int m,
                           thread Sums& sums) const thread {
    MLX_ANVIL_UNROLL
    for (int half_step = 0; half_step < 4; half_step += 2) {
      MLX_ANVIL_UNROLL
      for (int q = 0; q < 4; q += 2) {
        MLX_ANVIL_UNROLL
        for (int p = half_step; p < half_step + 2; ++p) {
          const Fragment<T> right = transposed(fragment_of_pair<T>(eight[p]), place);
          MLX_ANVIL_UNROLL
          for (int i = q; i < q + 2; ++i) {
            thread Fragment<float>& sum = sums.fragments[i][m];
            metal::simdgroup_multiply_accumulate(sum, weights[i][p], right, sum);
          }
        }
      }
    }
  }
};

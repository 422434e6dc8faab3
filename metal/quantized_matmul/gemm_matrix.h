// Tiles of x W^T on matrix units of 16-bit types, for 9 and more rows of x.
//
// A tile of w and x passes through threadgroup memory by asynchronous copies. Lanes unpack their
// codes in registers, straight into fragments of W, the left operand. The order of columns within a
// fragment is free, as long as both operands have the same. So a lane takes eight adjacent columns
// at a time, of its own row of w and of x: one piece of codes, and one vector of x, which are four
// fragments each. It has 32 adjacent columns of 128, and so one scale and bias (nvfp4: two).
//
// Pieces are taken in an order that differs between the four lanes of a row, and vectors in
// threadgroup memory are swizzled, so that loads have no bank conflicts.
#pragma once

#include "metal/common/async_copy.h"
#include "metal/common/reg_tile.h"
#include "metal/quantized_matmul/gemm_codes.h"
#include "metal/quantized_matmul/lane_weights.h"

// kAcross simdgroups share the rows of w of a tile, 8 * kFragments each. kAlong of them split the
// columns of a step, 128 each. With two matrices, every other fragment is of the second.
template <typename T,
          typename Format,
          int kRowFragments,
          int kFragments,
          int kAcross,
          int kAlong,
          int kMatrices = 1>
struct GemmTile {
  enum { kRows = 8 * kRowFragments, kOutputs = 8 * kFragments * kAcross };
  enum {
    kFirst = kAcross,
    kSimdgroups = kAcross * kAlong,
    kThreads = 32 * kSimdgroups,
    kColumns = 128 * kAlong
  };
  enum { kBits = Format::kBits, kMatrixCount = kMatrices };
  using Element = T;
  // uint4 per row and step: of w, in memory too (an odd number if vectors are not swizzled), of x.
  enum { kWords = kAlong * kBits, kXVectors = kAlong * 16 };
  enum { kIsSwizzled = GemmPiece<kBits>::kIsPart && (kWords % 8 == 0 || kWords == 4) };
  enum { kStride = kIsSwizzled ? int(kWords) : kWords | 1 };
  // In a stage, in uint4: words of w, then x, then for each row of w its scales and its biases.
  enum { kXBegin = kOutputs * kStride, kFactorsBegin = kXBegin + kRows * kXVectors };
  enum { kStage = kFactorsBegin + kOutputs * kAlong };
  using Scale = typename Format::template Scale<T>;
  using Factors = GemmFactors<T, Format>;
  using Sums = RegTile<float, 8 * kFragments, kRows>;  // W x^T
  static_assert(kFragments % 2 == 0, "two fragments fill the matrix unit");

  // The tile's first row of each.
  const device uint4* words[kMatrices];
  const device uint4* x;
  const device Scale* scales[kMatrices];
  const device T* biases[kMatrices];
  uint row_words, row_x, row_groups;  // per row of w and x: uint4, and groups
  uint last_output, last_row;
  uint group_shift, factor_bytes;
  uint across, along;
  uint copier;  // adjacent threads of the hardware copy adjacent vectors
  uint magic;   // as gemm_weights takes it
  FragmentPlace place;

  METAL_FUNC uint factors_per_step() const thread { return uint(kColumns) >> group_shift; }

  METAL_FUNC void start_copies(threadgroup uint4* stage, uint step) const thread {
    enum { kXCopies = kRows * kXVectors };
    start_word_copies(stage, step);
    MLX_ANVIL_UNROLL
    for (int j = 0; j < (kXCopies + kThreads - 1) / kThreads; ++j) {
      const uint i = copier + j * kThreads, row = i / kXVectors, v = i % kXVectors;
      if (kXCopies % kThreads == 0 || i < kXCopies) {
        copy_vector(stage + kXBegin + row * kXVectors + (v ^ row % 2 * 4), x,
                    metal::min(row, last_row), row_x, step * kXVectors + v);
      }
    }
    threadgroup uint4* const factors = stage + kFactorsBegin;
    if (factor_bytes == 16) {
      copy_factors<uint4>(factors, step);
    } else if (factor_bytes == 8) {
      copy_factors<uint2>(factors, step);
    } else {
      copy_factors<uint>(factors, step);
    }
  }

  METAL_FUNC void start_word_copies(threadgroup uint4* stage, uint step) const thread {
    enum { kWordCopies = kOutputs * kWords };
    MLX_ANVIL_UNROLL
    for (int j = 0; j < (kWordCopies + kThreads - 1) / kThreads; ++j) {
      const uint i = copier + j * kThreads, row = i / kWords, v = i % kWords;
      if (kWordCopies % kThreads == 0 || i < kWordCopies) {
        copy_vector(stage + row * kStride + swizzled(row, v),
                    is_of_last(row) ? words[kMatrices - 1] : words[0], row_of_matrix(row),
                    row_words, step * kWords + v);
      }
    }
  }

  // Adds the products of this simdgroup's columns, of which `left` are left for the threadgroup.
  METAL_FUNC void add_products(const threadgroup uint4* stage,
                               uint left,
                               thread Sums& sums) const thread {
    const uint t = place.column / 2, own = 8 * kFragments * across + place.row;
    Factors factors[kFragments];
    if (!metal::is_same_v<Format, Nvfp4Format>) {
      read_factors(stage, own, 32 * t, left, factors);
    }
    // Unrolled, sums of 64 rows would leave too few registers.
    if (kRowFragments < 8) {
      MLX_ANVIL_UNROLL
      for (int j = 0; j < 4; ++j) {
        add_pieces(stage, own, t, j ^ t, left, factors, sums);
      }
    } else {
      MLX_ANVIL_NO_UNROLL
      for (int j = 0; j < 4; ++j) {
        add_pieces(stage, own, t, j ^ t, left, factors, sums);
      }
    }
  }

 protected:
  METAL_FUNC void add_pieces(const threadgroup uint4* stage,
                             uint own,
                             uint t,
                             uint piece,
                             uint left,
                             thread Factors (&factors)[kFragments],
                             thread Sums& sums) const thread {
    if (metal::is_same_v<Format, Nvfp4Format>) {
      read_factors(stage, own, 32 * t + 8 * piece, left, factors);
    }
    uint weights[kFragments][4];
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      gemm_weights(codes_of(stage + (own + 8 * f) * kStride, t, piece), factors[f], magic,
                   weights[f]);
    }
    const threadgroup uint4* const xs = stage + kXBegin + place.row * kXVectors +
                                        ((16 * along + 4 * t + piece) ^ place.row % 2 * 4);
    MLX_ANVIL_UNROLL
    for (int m = 0; m < kRowFragments; ++m) {
      multiply(weights, xs[8 * m * kXVectors], m, sums);
    }
  }

  METAL_FUNC static bool is_of_last(uint row) { return kMatrices > 1 && row / 8 % 2 != 0; }
  // Rows past the last repeat it.
  METAL_FUNC uint row_of_matrix(uint row) const thread {
    return metal::min(kMatrices == 1 ? row : row / 16 * 8 + row % 8, last_output);
  }

  METAL_FUNC static uint swizzled(uint row, uint v) {
    return !kIsSwizzled ? v : kWords == 4 ? v ^ row / 2 % 4 : v ^ row % 8;
  }

  // Vectors past the end of a row become zero.
  METAL_FUNC static void copy_vector(
      threadgroup uint4* to, const device uint4* first, uint row, uint row_size, uint v) {
    const device uint4* const from = first + (ulong(row) * row_size + v);
    if (steps_are_whole) {
      start_copy(to, from);
    } else {
      start_copy(to, v < row_size ? from : first, v < row_size);
    }
  }

  template <typename Unit>
  METAL_FUNC void copy_factors(threadgroup uint4* to, uint step) const thread {
    enum { kArrays = Factors::kArrays };
    const uint bytes = factors_per_step() * sizeof(Scale), of_row = row_groups * sizeof(Scale);
    const uint units = bytes / sizeof(Unit), unit_bits = metal::ctz(units);
    MLX_ANVIL_NO_UNROLL
    for (uint i = copier; i < kOutputs * kArrays * units; i += kThreads) {
      const uint array = i >> unit_bits, row = row_of_matrix(array / kArrays);
      const bool last = is_of_last(array / kArrays);
      const device Scale* const own_scales = last ? scales[kMatrices - 1] : scales[0];
      const device T* const own_biases = last ? biases[kMatrices - 1] : biases[0];
      const uint begin = step * bytes + (i & (units - 1)) * sizeof(Unit);
      const device uchar* const from = array % kArrays == 0
                                           ? reinterpret_cast<const device uchar*>(own_scales)
                                           : reinterpret_cast<const device uchar*>(own_biases);
      start_copy(
          reinterpret_cast<threadgroup Unit*>(to) + i,
          reinterpret_cast<const device Unit*>(
              from + (ulong(row) * of_row + metal::min(begin, of_row - uint(sizeof(Unit))))));
    }
  }

  // For each of the lane's rows, those of the group of column `column` of the simdgroup's; zero
  // past the end of the row.
  METAL_FUNC void read_factors(const threadgroup uint4* stage,
                               uint row,
                               uint column,
                               uint left,
                               thread Factors (&factors)[kFragments]) const thread {
    enum { kArrays = Factors::kArrays };
    const uint count = factors_per_step();
    const threadgroup Scale* from =
        reinterpret_cast<const threadgroup Scale*>(stage + kFactorsBegin) +
        (row * kArrays * count + ((128 * along + column) >> group_shift));
    MLX_ANVIL_UNROLL
    for (int f = 0; f < kFragments; ++f) {
      factors[f].read(from + 8 * f * kArrays * count, count);
      if (!steps_are_whole && 128 * along + column >= left) {
        factors[f].clear();
      }
    }
  }

  METAL_FUNC uint2 codes_of(const threadgroup uint4* row, uint t, uint piece) const thread {
    using Piece = GemmPiece<kBits>;
    const uint own = 4 * t + piece, v = along * kBits + Piece::vector_of(own);
    // Rows of a lane differ by multiples of 8, which does not change the swizzle.
    return Piece::load(row + swizzled(place.row, v), own);
  }

  // Adds W x^T for eight rows of x and 32 columns.
  METAL_FUNC void multiply(const thread uint (&weights)[kFragments][4],
                           uint4 eight,
                           int m,
                           thread Sums& sums) const thread {
    MLX_ANVIL_UNROLL
    for (int half_step = 0; half_step < 4; half_step += 2) {
      MLX_ANVIL_UNROLL
      for (int f = 0; f < kFragments; f += 2) {
        MLX_ANVIL_UNROLL
        for (int p = half_step; p < half_step + 2; ++p) {
          const Fragment<T> right = transposed(fragment_of_pair<T>(eight[p]), place);
          MLX_ANVIL_UNROLL
          for (int i = f; i < f + 2; ++i) {
            thread Fragment<float>& sum = sums.fragments[i][m];
            metal::simdgroup_multiply_accumulate(sum, fragment_of_pair<T>(weights[i][p]), right,
                                                 sum);
          }
        }
      }
    }
  }
};

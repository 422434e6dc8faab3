// Staging of w and x in threadgroup memory for small products on matrix units (gemv_matrix.h).
#pragma once

#include "metal/common/async_copy.h"
#include "metal/quantized_matmul/dequant.h"

// True if x is staged too. Otherwise it is loaded from device memory when it is used.
constant bool x_is_staged [[function_constant(4)]];

// Rows of x per threadgroup, and columns per step of a simdgroup. K is a multiple of
// kMatrixColumns.
enum { kMatrixRows = 8, kMatrixColumns = 256 };
// Limits the registers per thread: this many threads must fit.
enum { kMatrixThreadsOfRegisters = 512 };

// Returns row `row` of rows that lie `bytes` apart. Compiles to one PTX instruction.
template <typename U>
METAL_FUNC const device U* row_at(const device U* first, uint row, uint bytes) {
  return reinterpret_cast<const device U*>(reinterpret_cast<const device uchar*>(first) +
                                           ulong(row) * bytes);
}

// Matrices of one shape whose rows are staged. Rows are numbered over all batches.
template <typename T, int kMatrices>
struct StagedMatrices {
  const device uint* words[kMatrices];
  const device T* scales[kMatrices];
  const device T* biases[kMatrices];
  uint columns;
  uint group_shift;
  uint first;  // first and last row of this batch
  uint last;
};

// What one step of a simdgroup reads from threadgroup memory: each row's words of w, then each
// row's scales and biases, then rows of x. Chunks of two vectors are swizzled within a row, so that
// the lanes of a fragment have no bank conflicts.
template <typename T, int kGroup, int kFragments>
struct MatrixStage {
  enum { kRows = 8 * kFragments, kGroups = kMatrixColumns / kGroup };
  enum { kVectors = kMatrixColumns / 32, kXVectors = kMatrixColumns / 8 };  // per row
  enum { kFactorSize = kGroups < 4 ? int(kGroups) : 4, kFactorVectors = kGroups / kFactorSize };
  enum { kWeights = kRows * kVectors + kRows * kGroups / 4 };  // in uint4; x starts after them
  using Factors = metal::vec<T, kFactorSize>;
  static_assert(kWeights % 8 == 0, "copies that straddle two lines of banks take twice as long");

  // Size in uint4 for `rows` rows of x.
  METAL_FUNC static uint size(uint rows) { return kWeights + (x_is_staged ? rows * kXVectors : 0); }

  // Words of a row from `word` on, up to the end of their vector.
  METAL_FUNC static threadgroup uint* words(threadgroup uint4* stage, int row, int word) {
    const int vector = word / 4, chunk = vector / 2 ^ row % 4;
    return reinterpret_cast<threadgroup uint*>(stage + row * kVectors + 2 * chunk + vector % 2) +
           word % 4;
  }
  // Eight columns of a row of x. The XOR swizzle spreads rows over the banks. In PTX, all of the
  // address but the row's place is an immediate.
  METAL_FUNC static threadgroup uint4* x(threadgroup uint4* stage, int row, int vector) {
    threadgroup uint4* const place = stage + (row * int(kXVectors) + ((vector & 7) ^ (row & 7)));
    return place + (int(kWeights) + (vector & ~7));
  }
  // Scales of a row, followed by its biases.
  METAL_FUNC static threadgroup Factors* factors(threadgroup uint4* stage, int row) {
    return reinterpret_cast<threadgroup Factors*>(stage + kRows * kVectors) +
           2 * kFactorVectors * row;
  }
};

// 1 to 8 rows of x.
template <typename T>
struct StagedRows {
  const device T* first;
  uint rows;
};

// Copies of one lane, for one step at a time. A tile has equally many rows of each matrix, one
// matrix after the other.
template <typename T, int kGroup, int kFragments, int kMatrices>
class StageCopies {
  using Stage = MatrixStage<T, kGroup, kFragments>;
  using Factors = typename Stage::Factors;
  enum { kRowsOfMatrix = Stage::kRows / kMatrices };
  enum { kCopiedRows = 32 / Stage::kVectors, kWordCopies = Stage::kRows / kCopiedRows };
  enum { kFactors = Stage::kRows * 2 * Stage::kFactorVectors };
  enum { kFactorCopies = (kFactors + 31) / 32 };
  static_assert(kRowsOfMatrix % kCopiedRows == 0, "a copy must not span matrices");

 public:
  METAL_FUNC StageCopies(StagedMatrices<T, kMatrices> matrices, StagedRows<T> x, uint lane) thread
      : first_(matrices.first),
        last_(matrices.last),
        bytes_of_words_(matrices.columns / 2),
        bytes_of_factors_((matrices.columns >> matrices.group_shift) * sizeof(T)),
        lane_(lane),
        x_(reinterpret_cast<const device uint4*>(x.first)),
        rows_(x.rows) {
    MLX_ANVIL_UNROLL
    for (int m = 0; m < kMatrices; ++m) {
      words_[m] = reinterpret_cast<const device uint4*>(matrices.words[m]) + lane % Stage::kVectors;
    }
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kFactorCopies; ++i) {
      const uint vector = factor_vector(i), m = factor_row(i) / kRowsOfMatrix;
      const bool of_scales = vector < Stage::kFactorVectors;
      const device T* from = of_scales ? matrices.scales[0] : matrices.biases[0];
      if (kMatrices > 1 && m > 0) {
        from = of_scales ? matrices.scales[kMatrices - 1] : matrices.biases[kMatrices - 1];
      }
      factors_[i] = reinterpret_cast<const device Factors*>(from) + vector % Stage::kFactorVectors;
    }
  }

  // Starts copying one step of columns into a stage.
  METAL_FUNC void start(uint tile, uint step, threadgroup uint4* stage) const thread {
    const uint first = first_ + tile * kRowsOfMatrix;
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kWordCopies; ++i) {
      threadgroup uint* to = Stage::words(stage, kCopiedRows * i + lane_ / Stage::kVectors,
                                          4 * (lane_ % Stage::kVectors));
      const uint row =
          metal::min(first + kCopiedRows * i % kRowsOfMatrix + lane_ / Stage::kVectors, last_);
      start_copy(reinterpret_cast<threadgroup uint4*>(to),
                 row_at(words_[kCopiedRows * i / kRowsOfMatrix] + step * Stage::kVectors, row,
                        bytes_of_words_));
    }
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kFactorCopies; ++i) {
      if (32 * i + lane_ < kFactors) {
        const uint row = metal::min(first + factor_row(i) % kRowsOfMatrix, last_);
        start_copy(Stage::factors(stage, factor_row(i)) + factor_vector(i),
                   row_at(factors_[i] + step * Stage::kFactorVectors, row, bytes_of_factors_));
      }
    }
    if (x_is_staged) {
      static_assert(Stage::kXVectors == 32, "a lane copies a vector of each row");
      start_copy(Stage::x(stage, 0, lane_), columns(0, step) + lane_);
      MLX_ANVIL_NO_UNROLL
      for (uint row = 1; row < rows_; ++row) {
        start_copy(Stage::x(stage, row, lane_), columns(row, step) + lane_);
      }
    }
  }

  // Returns eight columns of a row of x in this step. Rows past the last repeat the last one.
  METAL_FUNC uint4 x(threadgroup uint4* stage, uint step, uint row, uint vector) const thread {
    const uint existing = metal::min(row, rows_ - 1);
    return x_is_staged ? *Stage::x(stage, existing, vector) : columns(existing, step)[vector];
  }

 private:
  METAL_FUNC uint factor_row(int i) const thread {
    return (32 * i + lane_) / (2 * Stage::kFactorVectors);
  }
  METAL_FUNC uint factor_vector(int i) const thread {
    return (32 * i + lane_) % (2 * Stage::kFactorVectors);
  }
  METAL_FUNC const device uint4* columns(uint row, uint step) const thread {
    return row_at(x_ + step * (kMatrixColumns / 8), row, 4 * bytes_of_words_);
  }

  const device uint4* words_[kMatrices];  // first source address of this lane, in row 0
  const device Factors* factors_[kFactorCopies];
  uint first_;
  uint last_;
  uint bytes_of_words_;  // per row
  uint bytes_of_factors_;
  uint lane_;
  const device uint4* x_;
  uint rows_;
};

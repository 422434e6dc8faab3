// What products of few rows by matrix products (gemv_matrix.h) read of w and x, on its way through
// threadgroup memory.
#pragma once

#include "metal/common/async_copy.h"
#include "metal/quantized_matmul/dequant.h"

// Whether x passes through the stages too; otherwise it is loaded when it is needed.
constant bool x_is_staged [[function_constant(4)]];

// Of a threadgroup: rows of x. Of a SIMD group: columns at a time, of which K is a multiple.
enum { kMatrixRows = 8, kMatrixColumns = 256 };
// So many threads have to fit into registers, to bound how many a thread takes.
enum { kMatrixThreadsOfRegisters = 512 };

// Row `row` of rows that are so many bytes apart: as PTX one instruction.
template <typename U>
METAL_FUNC const device U* row_at(const device U* first, uint row, uint bytes) {
  return reinterpret_cast<const device U*>(reinterpret_cast<const device uchar*>(first) +
                                           ulong(row) * bytes);
}

// Matrices of one shape from which rows of w are copied. Rows are numbered over all batches.
template <typename T, int kMatrices>
struct StagedMatrices {
  const device uint* words[kMatrices];
  const device T* scales[kMatrices];
  const device T* biases[kMatrices];
  uint columns;
  uint group_shift;
  uint first;  // of the rows of this batch
  uint last;
};

// A SIMD group's part of threadgroup memory: what one step reads. Each row's words of w in vectors,
// two of which (a chunk) change places with others of the row, so that the lanes of a fragment do
// not meet in a bank; then each row's scales and biases; then rows of x.
template <typename T, int kGroup, int kFragments>
struct MatrixStage {
  enum { kRows = 8 * kFragments, kGroups = kMatrixColumns / kGroup };
  enum { kVectors = kMatrixColumns / 32, kXVectors = kMatrixColumns / 8 };  // in a row
  enum { kFactorSize = kGroups < 4 ? int(kGroups) : 4, kFactorVectors = kGroups / kFactorSize };
  enum { kWeights = kRows * kVectors + kRows * kGroups / 4 };  // of uint4; x begins behind them
  using Factors = metal::vec<T, kFactorSize>;
  static_assert(kWeights % 8 == 0,
                "copies to what begins within a line of banks take twice as long");

  // In uint4, with so many rows of x.
  METAL_FUNC static uint size(uint rows) { return kWeights + (x_is_staged ? rows * kXVectors : 0); }

  // Of a row, its words from `word` on, which do not leave a vector.
  METAL_FUNC static threadgroup uint* words(threadgroup uint4* stage, int row, int word) {
    const int vector = word / 4, chunk = vector / 2 ^ row % 4;
    return reinterpret_cast<threadgroup uint*>(stage + row * kVectors + 2 * chunk + vector % 2) +
           word % 4;
  }
  // Of a row of x, eight columns: for each row in another place of a line of banks.
  // As PTX what follows the row's place is part of the instruction.
  METAL_FUNC static threadgroup uint4* x(threadgroup uint4* stage, int row, int vector) {
    threadgroup uint4* const place = stage + (row * int(kXVectors) + ((vector & 7) ^ (row & 7)));
    return place + (int(kWeights) + (vector & ~7));
  }
  // Of a row: its scales, and behind them its biases.
  METAL_FUNC static threadgroup Factors* factors(threadgroup uint4* stage, int row) {
    return reinterpret_cast<threadgroup Factors*>(stage + kRows * kVectors) +
           2 * kFactorVectors * row;
  }
};

// Rows of x, of which there are 1 to 8.
template <typename T>
struct StagedRows {
  const device T* first;
  uint rows;
};

// The copies of one lane for one step of a tile after the other. A tile is as many rows of each
// matrix, one matrix's behind the other's.
template <typename T, int kGroup, int kFragments, int kMatrices>
class StageCopies {
  using Stage = MatrixStage<T, kGroup, kFragments>;
  using Factors = typename Stage::Factors;
  enum { kRowsOfMatrix = Stage::kRows / kMatrices };
  enum { kCopiedRows = 32 / Stage::kVectors, kWordCopies = Stage::kRows / kCopiedRows };
  enum { kFactors = Stage::kRows * 2 * Stage::kFactorVectors };
  enum { kFactorCopies = (kFactors + 31) / 32 };
  static_assert(kRowsOfMatrix % kCopiedRows == 0, "a copy is of one matrix");

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

  // A step of columns into a stage.
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

  // Eight columns of a step, of a row of x; of the last one in place of those that do not exist.
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

  const device uint4* words_[kMatrices];  // where the lane's copies begin, in row 0
  const device Factors* factors_[kFactorCopies];
  uint first_;
  uint last_;
  uint bytes_of_words_;  // of a row
  uint bytes_of_factors_;
  uint lane_;
  const device uint4* x_;
  uint rows_;
};

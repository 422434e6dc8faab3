// What products of few rows by matrix products (gemv_matrix.h) read of w, on its way through
// threadgroup memory.
#pragma once

#include "metal/common/async_copy.h"
#include "metal/quantized_matmul/dequant.h"

enum { kMatrixSimdgroups = 4, kMatrixThreads = 32 * kMatrixSimdgroups };
// Of a threadgroup: rows of x. Of a SIMD group: columns at a time, of which K is a multiple.
enum { kMatrixRows = 8, kMatrixColumns = 256 };
// So many threads have to fit into registers, to bound how many a thread takes.
enum { kMatrixThreadsOfRegisters = 4 * kMatrixThreads };

// The rows of w of one fragment: eight of a matrix, its last one in place of those beyond.
template <typename T>
struct FragmentRows {
  WeightRow<T, AffineFormat<4>> matrix;
  int first;
  int last;  // of the matrix
  long words_of_row;
  long groups_of_row;

  METAL_FUNC const device uint4* words(int i) const thread {
    return reinterpret_cast<const device uint4*>(matrix.words + row(i) * words_of_row);
  }
  METAL_FUNC const device T* scales(int i) const thread {
    return matrix.scales + row(i) * groups_of_row;
  }
  METAL_FUNC const device T* biases(int i) const thread {
    return matrix.biases + row(i) * groups_of_row;
  }

 private:
  METAL_FUNC long row(int i) const thread { return metal::min(first + i, last); }
};

// A SIMD group's part of threadgroup memory: what one step reads of w. Each row's words in vectors,
// two of which (a chunk) change places with others of the row, so that the lanes of a fragment do
// not meet in a bank; then each row's scales and biases.
template <typename T, int kGroup, int kFragments>
struct MatrixStage {
  enum { kRows = 8 * kFragments, kGroups = kMatrixColumns / kGroup };
  enum { kVectors = kMatrixColumns / 32 };  // of words, in a row
  enum { kFactorSize = kGroups < 4 ? int(kGroups) : 4, kFactorVectors = kGroups / kFactorSize };
  enum { kCount = kRows * kVectors + kRows * kGroups / 4 };  // of uint4
  using Factors = metal::vec<T, kFactorSize>;

  // Of a row, its words from `word` on, which do not leave a vector.
  METAL_FUNC static threadgroup uint* words(threadgroup uint4* stage, int row, int word) {
    const int vector = word / 4, chunk = vector / 2 ^ row % 4;
    return reinterpret_cast<threadgroup uint*>(stage + row * kVectors + 2 * chunk + vector % 2) +
           word % 4;
  }
  // Of a row: its scales, and behind them its biases.
  METAL_FUNC static threadgroup Factors* factors(threadgroup uint4* stage, int row) {
    return reinterpret_cast<threadgroup Factors*>(stage + kRows * kVectors) +
           2 * kFactorVectors * row;
  }
};

// The copies of one lane for one step after the other.
template <typename T, int kGroup, int kFragments>
class StageCopies {
  using Stage = MatrixStage<T, kGroup, kFragments>;
  using Factors = typename Stage::Factors;
  enum { kWordCopies = Stage::kRows / 4 };  // eight lanes copy a row
  enum { kFactors = Stage::kRows * 2 * Stage::kFactorVectors };
  enum { kFactorCopies = (kFactors + 31) / 32 };

 public:
  METAL_FUNC StageCopies(const thread FragmentRows<T> (&rows)[kFragments], int lane) thread
      : lane_(lane) {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kWordCopies; ++i) {
      words_[i] = rows[i / 2].words(4 * (i % 2) + lane / 8) + lane % 8;
    }
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kFactorCopies; ++i) {
      const int row = factor_row(i), vector = factor_vector(i);
      MLX_ANVIL_UNROLL
      for (int f = 0; f < kFragments; ++f) {
        if (row / 8 == f || f == 0) {  // a lane without a copy has no row
          const device T* from =
              vector < Stage::kFactorVectors ? rows[f].scales(row % 8) : rows[f].biases(row % 8);
          factors_[i] =
              reinterpret_cast<const device Factors*>(from) + vector % Stage::kFactorVectors;
        }
      }
    }
  }

  // A step of columns into a stage.
  METAL_FUNC void start(int step, threadgroup uint4* stage) const thread {
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kWordCopies; ++i) {
      threadgroup uint* to = Stage::words(stage, 4 * i + lane_ / 8, 4 * (lane_ % 8));
      start_copy(reinterpret_cast<threadgroup uint4*>(to), words_[i] + step * Stage::kVectors);
    }
    MLX_ANVIL_UNROLL
    for (int i = 0; i < kFactorCopies; ++i) {
      if (32 * i + lane_ < kFactors) {
        start_copy(Stage::factors(stage, factor_row(i)) + factor_vector(i),
                   factors_[i] + step * Stage::kFactorVectors);
      }
    }
  }

 private:
  METAL_FUNC int factor_row(int i) const thread {
    return (32 * i + lane_) / (2 * Stage::kFactorVectors);
  }
  METAL_FUNC int factor_vector(int i) const thread {
    return (32 * i + lane_) % (2 * Stage::kFactorVectors);
  }

  int lane_;
  const device uint4* words_[kWordCopies];
  const device Factors* factors_[kFactorCopies];
};

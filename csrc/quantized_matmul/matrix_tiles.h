// Tiles of the kernels for matrix units, as their launches count them.
#pragma once

#include "quantized_matmul/gpu_support.h"

namespace mlx_anvil {

// ---- gemv_matrix.metal --------------------------------------------------------------------------

inline constexpr int64_t kMatrixStages = 2;  // per simdgroup, in threadgroup memory
// Bytes that every GPU with matrix units has, and threads per multiprocessor, limited by registers.
inline constexpr int64_t kMemoryOfThreadgroup = 99 << 10;
inline constexpr int64_t kThreadsAtOnce = 512;

// Rows of w per tile, and simdgroups that share it.
struct MatrixTile {
  int64_t outputs;
  int64_t simdgroups;

  // Bytes of partial sums.
  int64_t static_memory() const { return simdgroups * (outputs / 8) * 32 * 8; }

  int64_t stages(int64_t rows_of_x, const QuantizedFormat& format) const {
    const int64_t codes = kMatrixColumns / 2, factors = kMatrixColumns / format.group * 4;
    return kMatrixStages * simdgroups *
           (outputs * (codes + factors) + rows_of_x * kMatrixColumns * 2);
  }
};

// ---- gemm_matrix.metal, gemm_group.metal and gemm_plain.metal -----------------------------------

inline constexpr int64_t kGemmThreads = 256;       // all tiles
inline constexpr int64_t kDepthOfSimdgroup = 128;  // terms per step

constexpr int64_t odd(int64_t vectors) {
  return vectors | 1;
}

enum class GemmKernel { kMatrix, kGroup, kPlain };

// An instantiation of such a kernel: rows of x, and results per row.
struct GemmTile {
  GemmKernel kernel;
  int64_t rows, results;
  int64_t along;  // simdgroups that split the terms
  int64_t stages;

  bool transposed() const { return kernel != GemmKernel::kPlain; }
  int64_t terms() const { return kDepthOfSimdgroup * along; }

  // Bytes, as GemmTile::kStage and GemmPlainTile::kStage count them in uint4.
  int64_t memory(const QuantizedFormat& format) const {
    const int64_t bits = format.bits, x = rows * terms() / 8;
    if (transposed()) {
      const int64_t words = along * bits;
      const bool swizzled = (bits & (bits - 1)) == 0 && (words % 8 == 0 || words == 4);
      const int64_t stride = swizzled ? words : odd(words);
      return 16 * stages * (results * stride + x + results * along);
    }
    const int64_t stride = bits % 2 == 0 && bits != 6 ? bits : odd(bits);
    const int64_t factors = format.has_biases() ? 16 : format.group == 16 ? 8 : 4;
    return 16 * stages * (terms() * stride + x + terms() * factors / 16);
  }
};

// Bytes that one copy of scales or of biases has, or 0 if their rows do not consist of such.
inline int64_t factor_bytes(const QuantizedFormat& format,
                            const GemmTile& tile,
                            const QuantizedWeightArrays& weights) {
  const int64_t of_step = tile.terms() / format.group * weights.scales->itemsize();
  for (const int bytes : {16, 8, 4}) {
    const bool whole = format.has_biases()
                           ? rows_are_vectors({weights.scales, weights.biases}, bytes)
                           : rows_are_vectors({weights.scales}, bytes);
    if (whole && (bytes == 4 || (tile.transposed() && of_step % bytes == 0))) {
      return bytes;
    }
  }
  return 0;
}

}  // namespace mlx_anvil

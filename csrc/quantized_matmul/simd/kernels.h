// The CPU kernels of quantized matrices, and the order in which they process columns.
//
// Lane order. A unit is the smallest number of 32-bit words that holds a whole number of codes: one
// word of 2-, 4- and 8-bit codes, three of 3- and 6-bit codes, five of 5-bit codes. A block is one
// unit per lane of a vector. Vector i of a block holds code i of each unit. Unpacking then only
// shifts within lanes, and x is stored in the same order, so only the columns of a result are ever
// reordered.
//
//   column (block * lanes + lane) * values + i   <->   vector block * values + i, lane `lane`
//
// With one value per unit this is the natural order. Columns past the last are zero.
#pragma once

#include "common/isa.h"
#include "quantized_matmul/problem.h"

namespace mlx_anvil {

// Codes per unit.
constexpr int unit_values(int bits) {
  return bits == 4 ? 8 : bits == 8 ? 4 : bits == 3 || bits == 5 ? 32 : 16;
}

// A block of int_gemv.cpp has this many vectors, or a divisor of it.
inline constexpr int64_t kQuantizedIntVectors = 32;

// One matrix of a batch.
struct QuantizedMatrixView {
  QuantizedFormat format;
  KernelDtype dtype;  // of x and of results
  int64_t columns;
  int64_t outputs;
  QuantizedWeights weights;
};

// Rows of float32 vectors. Vectors 2 p and 2 p + 1 of a row start at p * pair_step: contiguous in a
// plain row, strided in panels (common/simd/panels.h).
struct LaneRows {
  float* data;
  int64_t row_step;
  int64_t pair_step;
};

struct QuantizedGemvArgs {
  QuantizedMatrixView matrix;
  int64_t first, count;  // rows of the matrix
  int64_t x_rows;        // 1, 2, 4 or 8: a power of two limits the number of kernels
  const float* x;        // x_rows plain rows in lane order; for int_gemv, rows from int_pack
  const float* sums;     // x_rows rows of one vector per block: the sum of the block's vectors
  float* out;            // [x_rows][count]
  float* scratch;        // gemv_scratch() or int_gemv_scratch() floats
};

// Part of a product kPlain: sums over some rows of the matrix, for some of its columns.
struct QuantizedPlainGemvArgs {
  QuantizedMatrixView matrix;
  // Blocks of columns. The first starts with a group, and the blocks span at most `lanes` groups.
  // For int_plain_gemv, `first_block` is a multiple of such a span instead.
  int64_t first_block, blocks;
  int64_t first, count;  // rows of the matrix
  // The thread's likely next item, for int_plain_gemv to prefetch.
  int64_t next_block, next;
  int64_t x_rows;  // 1, 2, 4 or 8
  const float* x;  // [count][x_rows]
  // [x_rows][blocks], each block in lane order, or in the order of int_plain_gemv.
  float* out;
};

// A tile of a result, of up to kGemmRows rows: columns [first, first + count) are rows of W
// (kTransposed) or its blocks (kPlain).
struct QuantizedGemmArgs {
  QuantizedMatrixView matrix;
  QuantizedProduct product;
  int64_t first, count;
  int64_t x_rows;
  LaneRows x;      // panels; in lane order for kTransposed
  void* out;       // row-contiguous, in matrix.dtype; x_rows rows
  float* scratch;  // gemm_scratch() floats
};

// Packs rows [first, first + count) of x.
struct QuantizedIntGemmPackArgs {
  QuantizedMatrixView matrix;
  const void* x;  // [x_rows][summed dimension], in matrix.dtype
  int64_t x_rows;
  int64_t first, count;
  void* to;         // packed_bytes() for all rows, aligned to a cache line
  uint8_t* finite;  // per row; if false, `multiply` leaves an undefined result row
};

// Columns [first, first + count) of a result: rows of the matrix (kTransposed) or its columns.
struct QuantizedIntGemmArgs {
  QuantizedMatrixView matrix;
  int64_t first, count;  // `first` is a multiple of columns()
  int64_t x_rows;
  const void* x;  // packed
  void* out;      // row-contiguous, in matrix.dtype; x_rows rows
  void* scratch;  // scratch() bytes, aligned to a cache line
};

// Integer GEMM: a product of many rows of x.
struct QuantizedIntGemm {
  // Returns the result columns per tile, or 0 if this machine has no kernel for the format.
  int64_t (*columns)(const QuantizedMatrixView&);
  int64_t (*packed_bytes)(const QuantizedMatrixView&, int64_t x_rows);
  void (*pack)(const QuantizedIntGemmPackArgs&);
  // Returns false if a scale or bias is not finite. `gemm` must then take the product.
  bool (*multiply)(const QuantizedIntGemmArgs&);
  int64_t (*scratch)(const QuantizedMatrixView&, int64_t x_rows);
};

// Gradients in affine scales and biases: with G = y^T x,
//   d_scales[n, g] = sum over k in group g of G[n, k] code[n, k]
//   d_biases[n, g] = sum over k in group g of G[n, k]
struct QuantizedScaleGradientSizes {
  QuantizedMatrixView matrix;  // scales and biases are not read
  int64_t rows;                // of x and y in this pass
  bool has_scales;             // if false, only d_biases are wanted
};

// Packs pairs [first, first + count) of rows of x.
struct QuantizedScaleGradientPackArgs {
  QuantizedScaleGradientSizes sizes;
  const void* x;  // [rows][columns], in matrix.dtype
  int64_t first, count;
  float* to;  // packed() floats
};

struct QuantizedScaleGradientTileArgs {
  QuantizedScaleGradientSizes sizes;
  int64_t first, count;    // rows of the matrix, at most `panel`
  const void* y;           // [rows][outputs], in matrix.dtype
  float* x;                // packed
  float* sums;             // sums() floats: of the passes up to this one
  float* scratch;          // scratch() floats
  bool is_first, is_last;  // of the passes
  void* d_scales;          // [outputs][groups], in matrix.dtype; written by the last pass
  void* d_biases;
};

struct QuantizedScaleGradient {
  int64_t (*packed)(const QuantizedScaleGradientSizes&);
  int64_t (*sums)(const QuantizedScaleGradientSizes&);
  int64_t (*scratch)(const QuantizedScaleGradientSizes&);
  void (*pack)(const QuantizedScaleGradientPackArgs&);
  void (*multiply)(const QuantizedScaleGradientTileArgs&);
};

struct QuantizedCpuKernels {
  int32_t lanes;
  int32_t panel;      // columns per panel
  int32_t tile_rows;  // rows of the register tile; panels of x have a multiple of these
  // Converts a row of x to lane order. `vectors` is even and covers the columns.
  void (*load_row)(KernelDtype dtype,
                   const void* from,
                   int64_t columns,
                   int32_t values,
                   int64_t vectors,
                   float* to,
                   int64_t pair_step);
  // Converts the first `columns` of a row in lane order, with `values` vectors per block, to its
  // dtype.
  void (*store_row)(KernelDtype dtype,
                    const float* from,
                    int64_t pair_step,
                    int32_t values,
                    int64_t columns,
                    void* to);
  void (*add)(float* to, const float* from, int64_t count);  // whole vectors
  // `largest` returns the largest magnitude of a row; NaN counts as above infinity. `scale`
  // multiplies a row by `factor` in place.
  float (*largest)(KernelDtype dtype, const void* from, int64_t count);
  void (*scale)(KernelDtype dtype, void* row, int64_t count, float factor);
  void (*store_dense)(KernelDtype dtype, const float* from, int64_t count, void* to);
  void (*block_sums)(const float* row, int32_t values, int64_t blocks, float* sums);
  // activation(gate) * up, in place
  void (*gate)(const GateOptions& options, float* gate, const float* up, int64_t count);
  void (*gemv)(const QuantizedGemvArgs&);
  int64_t (*gemv_scratch)(const QuantizedMatrixView&);

  // The same product in integers (int_gemv.cpp). int_row_bytes returns the bytes of a packed row of
  // x, or 0 if this machine has no kernel for the format.
  int64_t (*int_row_bytes)(const QuantizedMatrixView&);
  // Packs float32 in natural order: kQuantizedIntVectors vectors or a multiple, padded with zeros.
  // Returns false if an element is not finite; `gemv` must then take the row.
  bool (*int_pack)(const QuantizedMatrixView&, const float* x, void* to);
  void (*int_gemv)(const QuantizedGemvArgs&);
  int64_t (*int_gemv_scratch)(const QuantizedMatrixView&);

  void (*plain_gemv)(const QuantizedPlainGemvArgs&);
  // The same in integers. int_plain_columns returns the columns per block, or 0 if this machine has
  // no kernel for the format and x_rows. int_plain_gemv returns false if a value is not finite;
  // plain_gemv must then take the call.
  int64_t (*int_plain_columns)(const QuantizedMatrixView&, int64_t x_rows);
  // Columns of the first block that precede the matrix. Their results are undefined.
  int64_t (*int_plain_skipped)(const QuantizedMatrixView&, int64_t x_rows);
  // Reorders one result row of `blocks` blocks into the order of columns.
  void (*int_plain_order)(const QuantizedMatrixView&, int64_t x_rows, int64_t blocks, float* row);
  bool (*int_plain_gemv)(const QuantizedPlainGemvArgs&);

  void (*gemm)(const QuantizedGemmArgs&);
  int64_t (*gemm_scratch)(const QuantizedMatrixView&,
                          QuantizedProduct,
                          int64_t count,
                          int64_t x_rows);
  QuantizedIntGemm int_gemm, int_plain_gemm;  // for kTransposed and kPlain
  QuantizedScaleGradient scale_gradient;
};

MLX_ANVIL_DECLARE_KERNELS(QuantizedCpuKernels, quantized_cpu_kernels)

}  // namespace mlx_anvil

// The CPU kernels of quantized matrices, and how they see the columns of a matrix.
//
// Lane order. A unit is the fewest 32-bit words that hold a whole number of codes: one word of 2-,
// 4- and 8-bit codes, three of 3 and 6 bits, five of 5 bits. A block is one unit for each lane of a
// vector. Vector i of a block has code i of each unit: unpacking is then shifts within lanes, and x
// comes in the same order, so that nothing is ever put back in order but the columns of a result.
//
//   column (block * lanes + lane) * values + i   <->   vector block * values + i, lane `lane`
//
// With one value per unit this is the natural order. Columns beyond the last are zero.
#pragma once

#include "common/isa.h"
#include "quantized_matmul/problem.h"

namespace mlx_anvil {

// Codes in a unit.
constexpr int unit_values(int bits) {
  return bits == 4 ? 8 : bits == 8 ? 4 : bits == 3 || bits == 5 ? 32 : 16;
}

// A block of cpu_int_gemv.cpp has as many vectors, or a part of them.
inline constexpr int64_t kQuantizedIntVectors = 32;

// One matrix of a batch.
struct QuantizedMatrixView {
  QuantizedFormat format;
  KernelDtype dtype;  // of the scales and biases of affine
  int64_t columns;
  int64_t outputs;
  QuantizedWeights weights;
};

// Rows of float32 vectors. Vectors 2 p and 2 p + 1 of a row are at p * pair_step: next to each
// other in a plain row, apart in panels (common/simd/panels.h).
struct LaneRows {
  float* data;
  int64_t row_step;
  int64_t pair_step;
};

struct QuantizedGemvArgs {
  QuantizedMatrixView matrix;
  int64_t first, count;  // rows of the matrix
  int64_t x_rows;        // 1, 2, 4 or 8: a power of two, so that few kernels serve
  const float* x;        // x_rows plain rows in lane order; for int_gemv, int_pack's rows
  const float* sums;     // x_rows rows of one vector per block: the sum of the block's vectors
  float* out;            // [x_rows][count]
  float* scratch;        // gemv_scratch() numbers, or int_gemv_scratch()
};

// Sums over some rows of the matrix for some of its columns, of the product kPlain.
struct QuantizedPlainGemvArgs {
  QuantizedMatrixView matrix;
  // Of columns, from the first of a group on; at most `lanes` groups, but for int_plain_gemv, for
  // which `first_block` is a multiple of so many.
  int64_t first_block, blocks;
  int64_t first, count;  // rows of the matrix
  // Where the thread is likely to go on: asked for in advance (int_plain_gemv).
  int64_t next_block, next;
  int64_t x_rows;  // 1, 2, 4 or 8
  const float* x;  // [count][x_rows]
  // [x_rows][blocks], each block in lane order, or in one of int_plain_gemv's own.
  float* out;
};

// A tile of a result, of up to gemm_rows rows: columns [first, first + count) of W's rows
// (kTransposed), or of its blocks (kPlain).
struct QuantizedGemmArgs {
  QuantizedMatrixView matrix;
  QuantizedProduct product;
  int64_t first, count;
  int64_t x_rows;
  LaneRows x;      // panels; in lane order for kTransposed
  void* out;       // row-contiguous, of matrix.dtype's size; x_rows rows
  float* scratch;  // gemm_scratch() numbers
};

// Rows [first, first + count) of x.
struct QuantizedIntGemmPackArgs {
  QuantizedMatrixView matrix;
  const void* x;  // [x_rows][summed over] of matrix.dtype
  int64_t x_rows;
  int64_t first, count;
  void* to;         // of all rows: packed_bytes(), from the start of a cache line
  uint8_t* finite;  // for each row; of one that is not, multiply makes a row of anything
};

// Columns [first, first + count) of a result: rows of the matrix (kTransposed) or columns.
struct QuantizedIntGemmArgs {
  QuantizedMatrixView matrix;
  int64_t first, count;  // `first` is a multiple of columns()
  int64_t x_rows;
  const void* x;  // packed
  void* out;      // row-contiguous, of matrix.dtype; x_rows rows
  void* scratch;  // scratch() bytes, from the start of a cache line
};

// A product of many rows of x in integers.
struct QuantizedIntGemm {
  // Of the result, that are multiplied at once; 0: not for this format on this machine.
  int64_t (*columns)(const QuantizedMatrixView&);
  int64_t (*packed_bytes)(const QuantizedMatrixView&, int64_t x_rows);
  void (*pack)(const QuantizedIntGemmPackArgs&);
  // False: a number of the matrix is not finite, and gemm has to do it.
  bool (*multiply)(const QuantizedIntGemmArgs&);
  int64_t (*scratch)(const QuantizedMatrixView&, int64_t x_rows);
};

struct QuantizedCpuKernels {
  int32_t lanes;
  int32_t panel;      // columns
  int32_t tile_rows;  // of the register tile: panels of x have a multiple of these
  // A row of x to lane order; `vectors` is even and covers the columns.
  void (*load_row)(KernelDtype dtype,
                   const void* from,
                   int64_t columns,
                   int32_t values,
                   int64_t vectors,
                   float* to,
                   int64_t pair_step);
  // The first `columns` of a row in lane order, of `values` vectors a block, to its dtype.
  void (*store_row)(KernelDtype dtype,
                    const float* from,
                    int64_t pair_step,
                    int32_t values,
                    int64_t columns,
                    void* to);
  void (*add)(float* to, const float* from, int64_t count);  // whole vectors
  // The largest magnitude of a row; NaN above all. And a row times `factor`, in place.
  float (*largest)(KernelDtype dtype, const void* from, int64_t count);
  void (*scale)(KernelDtype dtype, void* row, int64_t count, float factor);
  void (*store_dense)(KernelDtype dtype, const float* from, int64_t count, void* to);
  void (*block_sums)(const float* row, int32_t values, int64_t blocks, float* sums);
  void (*silu_gate)(float* gate, const float* up, int64_t count);  // in place
  void (*gemv)(const QuantizedGemvArgs&);
  int64_t (*gemv_scratch)(const QuantizedMatrixView&);

  // The same product in integers (cpu_int_gemv.cpp). Bytes of a packed row of x; 0: not for this
  // format on this machine. int_pack takes a multiple of kQuantizedIntVectors vectors of float32 in
  // their natural order, zeros beyond the row's columns; false: an element is not finite, and gemv
  // has to do it.
  int64_t (*int_row_bytes)(const QuantizedMatrixView&);
  bool (*int_pack)(const QuantizedMatrixView&, const float* x, void* to);
  void (*int_gemv)(const QuantizedGemvArgs&);
  int64_t (*int_gemv_scratch)(const QuantizedMatrixView&);

  void (*plain_gemv)(const QuantizedPlainGemvArgs&);
  // The same in integers: columns of a block, 0: not for this format on this machine. False: a
  // number is not finite, and plain_gemv has to do it.
  int64_t (*int_plain_columns)(const QuantizedMatrixView&);
  // Columns of the first block that come before the matrix's first; of anything in the result.
  int64_t (*int_plain_skipped)(const QuantizedMatrixView&, int64_t x_rows);
  // A row of its result, of so many blocks, to the order of columns.
  void (*int_plain_order)(const QuantizedMatrixView&, int64_t x_rows, int64_t blocks, float* row);
  bool (*int_plain_gemv)(const QuantizedPlainGemvArgs&);

  void (*gemm)(const QuantizedGemmArgs&);
  int64_t (*gemm_scratch)(const QuantizedMatrixView&,
                          QuantizedProduct,
                          int64_t count,
                          int64_t x_rows);
  QuantizedIntGemm int_gemm, int_plain_gemm;  // kTransposed and kPlain
};

MLX_ANVIL_DECLARE_KERNELS(QuantizedCpuKernels, quantized_cpu_kernels)

}  // namespace mlx_anvil

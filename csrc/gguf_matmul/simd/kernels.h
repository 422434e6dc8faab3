// The CPU kernels of matrices in GGUF's blocks.
//
// A superblock is 256 columns of a row: one block, or eight blocks of 32. The last superblock of a
// row of short blocks may have fewer.
#pragma once

#include "common/isa.h"
#include "gguf_matmul/problem.h"

namespace mlx_anvil {

inline constexpr int64_t kGgufSuperblock = 256;

// One matrix of a batch.
struct GgufView {
  GgufKind kind;
  KernelDtype dtype;        // of x and out
  int32_t activation_bits;  // as in QuantizedFormat
  int64_t columns;
  int64_t outputs;
  const uint8_t* w;

  int64_t row_bytes() const { return columns / gguf_block_columns(kind) * gguf_block_bytes(kind); }
};

// Columns [first, first + count) of a result: rows of the matrix (kTransposed), or its columns,
// from a superblock on (kPlain).
struct GgufFloatArgs {
  GgufView matrix;
  QuantizedProduct product;
  int64_t first, count;
  int64_t x_rows;
  const float* x;  // from pack_floats
  void* out;       // row-contiguous, in matrix.dtype; x_rows rows
  float* scratch;  // float_scratch() floats
};

// Rows [first, first + count) of the matrix times x_rows rows of x.
struct GgufGemvArgs {
  GgufView matrix;
  int64_t first, count;
  int64_t x_rows;  // at most kQuantizedGemvRows
  const void* x;   // x_rows times int_row_bytes() from int_pack, aligned to a cache line
  float* out;      // [x_rows][count]
};

struct GgufPackArgs {
  GgufView matrix;
  const void* x;  // [x_rows][columns], in matrix.dtype
  int64_t x_rows;
  int64_t first, count;  // rows to pack
  void* to;              // gemm_bytes() for all rows, aligned to a cache line
  uint8_t* finite;       // per row; if false, the row's results are undefined
};

struct GgufGemmArgs {
  GgufView matrix;
  int64_t first, count;  // rows of the matrix; `first` is a multiple of gemm_columns
  int64_t x_rows;
  const void* x;  // from gemm_pack
  void* out;      // row-contiguous, in matrix.dtype; x_rows rows
  void* scratch;  // gemm_scratch() bytes, aligned to a cache line
};

struct GgufCpuKernels {
  // Dequantises columns [first, first + count) of a row of w. `first` starts a superblock.
  void (*dequantize)(GgufKind kind,
                     const uint8_t* row,
                     int64_t first,
                     int64_t count,
                     KernelDtype dtype,
                     void* out);

  int32_t panel;  // result columns per panel of the float product
  // The product in float32, for any numbers. Rows have the same bits however many they are.
  int64_t (*packed_floats)(int64_t x_rows, int64_t x_columns);
  void (*pack_floats)(
      KernelDtype dtype, const void* x, int64_t x_rows, int64_t x_columns, float* to);
  int64_t (*float_scratch)(int64_t x_rows);
  void (*multiply_floats)(const GgufFloatArgs&);

  // x W^T in integers. int_row_bytes returns the bytes of a packed row of x, or 0 if this machine
  // has no such kernel; then the following are not called. Results are not finite if a scale of the
  // matrix is not.
  int64_t (*int_row_bytes)(const GgufView&);
  bool (*int_pack)(const GgufView&, const void* x, void* to);  // false if x is not finite
  void (*int_gemv)(const GgufGemvArgs&);

  int32_t gemm_columns;  // result columns per tile
  int64_t (*gemm_bytes)(const GgufView&, int64_t x_rows);
  void (*gemm_pack)(const GgufPackArgs&);
  int64_t (*gemm_scratch)(const GgufView&, int64_t x_rows);
  void (*int_gemm)(const GgufGemmArgs&);
};

MLX_ANVIL_DECLARE_KERNELS(GgufCpuKernels, gguf_cpu_kernels)

}  // namespace mlx_anvil

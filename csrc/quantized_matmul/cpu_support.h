// Shared helpers of cpu*.cpp and gemv_operand.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

#include "common/integers.h"
#include "quantized_matmul/simd/kernels.h"

namespace mlx_anvil {

// Aligns to cache lines: a vector load across two lines takes twice as long.
constexpr std::align_val_t kLine{64};

struct FreeFloats {
  void operator()(float* data) const { ::operator delete[](data, kLine); }
};

// Rounds up to a power of two. Kernels exist for those row counts only; padding rows are zero.
inline int64_t power_of_two_rows(int64_t rows) {
  int64_t power = 1;
  while (power < rows) {
    power *= 2;
  }
  return power;
}

using Floats = std::unique_ptr<float[], FreeFloats>;

inline Floats floats(int64_t count) {
  return Floats(new (kLine) float[static_cast<size_t>(std::max<int64_t>(1, count))]);
}

inline const void* at(const void* data, int64_t bytes) {
  return static_cast<const char*>(data) + bytes;
}
inline void* at(void* data, int64_t bytes) {
  return static_cast<char*>(data) + bytes;
}

// Stores `results` [rows][count] as columns [first, first + count) of `out` [rows][columns].
inline void store_results(KernelDtype dtype,
                          const float* results,
                          int64_t rows,
                          int64_t first,
                          int64_t count,
                          void* out,
                          int64_t columns) {
  for (int64_t m = 0; m < rows; ++m) {
    quantized_cpu_kernels().store_dense(dtype, results + m * count, count,
                                        at(out, (m * columns + first) * element_size(dtype)));
  }
}

// Rows of x per pass over a matrix, at most `most`, if a packed row has `row_bytes`. Tiles multiply
// faster than packed rows arrive from the third-level cache. So the rows of a pass fit the second,
// which has 2 MiB per core where there are tiles. With fewer than 64 rows, unpacking the matrix
// would take longer than reading them.
inline int64_t packed_rows_of_pass(int64_t row_bytes, int64_t rows, int64_t most) {
  constexpr int64_t kBytes = 1 << 20, kLeastRows = 64, kTileRows = 16;
  if (!uses_tiles()) {
    return most;
  }
  const int64_t fitting = std::clamp(kBytes / row_bytes, kLeastRows, most);
  return round_up(ceil_div(rows, ceil_div(rows, fitting)), kTileRows);
}

// One matrix of several, each [outputs, columns].
QuantizedMatrixView matrix_of_batch(const QuantizedFormat& format,
                                    KernelDtype dtype,
                                    int64_t columns,
                                    int64_t outputs,
                                    const QuantizedWeights& all,
                                    int64_t batch);

// Plain product of up to 8 rows of x: [rows][outputs] to [rows][columns], in matrix.dtype.
void quantized_plain_gemv_cpu(const QuantizedMatrixView& matrix,
                              const void* x,
                              int64_t rows,
                              void* out);

// Either product, for any number of rows of x, with the same layouts.
void quantized_gemm_cpu(const QuantizedMatrixView& matrix,
                        QuantizedProduct product,
                        const void* x,
                        int64_t rows,
                        void* out);

}  // namespace mlx_anvil

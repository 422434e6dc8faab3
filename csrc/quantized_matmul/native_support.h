// What native*.cpp and gemv_operand.cpp share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>

#include "common/rounding.h"
#include "quantized_matmul/cpu_kernels.h"

namespace mlx_anvil {

// At the start of a cache line: a vector load across two lines takes twice as long.
constexpr std::align_val_t kLine{64};

struct FreeFloats {
  void operator()(float* data) const { ::operator delete[](data, kLine); }
};

// Kernels are there for so many rows of x; the rest are zeros.
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

inline int64_t element_size(QuantizedDtype dtype) {
  return dtype == QuantizedDtype::kFloat32 ? 4 : 2;
}

inline const void* at(const void* data, int64_t bytes) {
  return static_cast<const char*>(data) + bytes;
}
inline void* at(void* data, int64_t bytes) {
  return static_cast<char*>(data) + bytes;
}

// The plain product of up to 8 rows of x: [rows][outputs] to [rows][columns], in matrix.dtype.
void quantized_plain_gemv_native(const QuantizedMatrixView& matrix,
                                 const void* x,
                                 int64_t rows,
                                 void* out);

// Either product of any number of rows of x, likewise.
void quantized_gemm_native(const QuantizedMatrixView& matrix,
                           QuantizedProduct product,
                           const void* x,
                           int64_t rows,
                           void* out);

}  // namespace mlx_anvil

// The table of kernels, and rows of a matrix in GGUF's blocks as numbers.
#include "common/simd/panels.h"
#include "gguf_matmul/simd/dequantize.h"
#include "gguf_matmul/simd/entries.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

template <class T>
void dequantize_to(GgufKind kind, const uint8_t* row, int64_t first, int64_t count, T* out) {
  float numbers[kGgufSuperblock];
  for (int64_t column = 0; column < count; column += kGgufSuperblock) {
    const int64_t left = count - column;
    const int64_t some = left < kGgufSuperblock ? left : kGgufSuperblock;
    gguf_dequantize(kind, row, first + column, some, numbers);
    for (int64_t i = 0; i < some; i += kLanes) {  // blocks are whole vectors
      store_lanes(out + column + i, load_lanes(numbers + i));
    }
  }
}

void dequantize(
    GgufKind kind, const uint8_t* row, int64_t first, int64_t count, KernelDtype dtype, void* out) {
  switch (dtype) {
    case KernelDtype::kFloat32:
      return dequantize_to(kind, row, first, count, static_cast<float*>(out));
    case KernelDtype::kFloat16:
      return dequantize_to(kind, row, first, count, static_cast<f16*>(out));
    default:
      return dequantize_to(kind, row, first, count, static_cast<bf16*>(out));
  }
}

}  // namespace

constinit const GgufCpuKernels gguf_cpu_kernels_table = {
    .dequantize = dequantize,
    .panel = kPanel,
    .packed_floats = gguf_packed_floats,
    .pack_floats = gguf_pack_floats,
    .float_scratch = gguf_float_scratch,
    .multiply_floats = gguf_multiply_floats,
    .int_row_bytes = gguf_int_row_bytes,
    .int_pack = gguf_int_pack,
    .int_gemv = gguf_int_gemv,
    .gemm_columns = kGgufGemmColumns,
    .gemm_bytes = gguf_gemm_bytes,
    .gemm_pack = gguf_gemm_pack,
    .gemm_scratch = gguf_gemm_scratch,
    .int_gemm = gguf_int_gemm,
};

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

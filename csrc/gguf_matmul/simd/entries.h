// Entries of the kernel table (kernels.h) that are defined outside rows.cpp.
#pragma once

#include "gguf_matmul/simd/kernels.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

int64_t gguf_packed_floats(int64_t x_rows, int64_t x_columns);
void gguf_pack_floats(
    KernelDtype dtype, const void* x, int64_t x_rows, int64_t x_columns, float* to);
int64_t gguf_float_scratch(int64_t x_rows);
void gguf_multiply_floats(const GgufFloatArgs& args);

int64_t gguf_int_row_bytes(const GgufView& matrix);
bool gguf_int_pack(const GgufView& matrix, const void* x, void* to);
void gguf_int_gemv(const GgufGemvArgs& args);

inline constexpr int32_t kGgufGemmColumns = 32;
int64_t gguf_gemm_bytes(const GgufView& matrix, int64_t x_rows);
void gguf_gemm_pack(const GgufPackArgs& args);
int64_t gguf_gemm_scratch(const GgufView& matrix, int64_t x_rows);
void gguf_int_gemm(const GgufGemmArgs& args);

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

// Entries of the kernel table (kernels.h) that are defined outside rows.cpp.
#pragma once

#include "quantized_matmul/simd/kernels.h"

// With AVX-512, vectors have 16 lanes.
#if defined(__AVX2__) && !defined(__AVX512F__)
#define MLX_ANVIL_AVX2_PRODUCTS
#endif

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

void quantized_gemv_kernel(const QuantizedGemvArgs& args);
int64_t quantized_gemv_scratch(const QuantizedMatrixView& matrix);

int64_t quantized_int_row_bytes(const QuantizedMatrixView& matrix);
bool quantized_int_pack(const QuantizedMatrixView& matrix, const float* x, void* to);
void quantized_int_gemv(const QuantizedGemvArgs& args);
int64_t quantized_int_gemv_scratch(const QuantizedMatrixView& matrix);

void quantized_plain_gemv(const QuantizedPlainGemvArgs& args);
int64_t quantized_int_plain_columns(const QuantizedMatrixView& matrix, int64_t x_rows);
int64_t quantized_int_plain_skipped(const QuantizedMatrixView& matrix, int64_t x_rows);
void quantized_int_plain_order(const QuantizedMatrixView& matrix,
                               int64_t x_rows,
                               int64_t blocks,
                               float* row);
bool quantized_int_plain_gemv(const QuantizedPlainGemvArgs& args);

void quantized_load_row(KernelDtype dtype,
                        const void* from,
                        int64_t columns,
                        int32_t values,
                        int64_t vectors,
                        float* to,
                        int64_t pair_step);
void quantized_store_row(KernelDtype dtype,
                         const float* from,
                         int64_t pair_step,
                         int32_t values,
                         int64_t columns,
                         void* to);

void quantized_gemm_kernel(const QuantizedGemmArgs& args);
int64_t quantized_gemm_scratch(const QuantizedMatrixView& matrix,
                               QuantizedProduct product,
                               int64_t count,
                               int64_t x_rows);

int64_t quantized_int_gemm_columns(const QuantizedMatrixView& matrix);
int64_t quantized_int_gemm_bytes(const QuantizedMatrixView& matrix, int64_t x_rows);
void quantized_int_gemm_pack(const QuantizedIntGemmPackArgs& args);
bool quantized_int_gemm(const QuantizedIntGemmArgs& args);
int64_t quantized_int_gemm_scratch(const QuantizedMatrixView& matrix, int64_t x_rows);

int64_t quantized_int_plain_gemm_columns(const QuantizedMatrixView& matrix);
int64_t quantized_int_plain_gemm_bytes(const QuantizedMatrixView& matrix, int64_t x_rows);
void quantized_int_plain_gemm_pack(const QuantizedIntGemmPackArgs& args);
bool quantized_int_plain_gemm(const QuantizedIntGemmArgs& args);
int64_t quantized_int_plain_gemm_scratch(const QuantizedMatrixView& matrix, int64_t x_rows);

int64_t quantized_scale_gradient_packed(const QuantizedScaleGradientSizes& sizes);
int64_t quantized_scale_gradient_sums(const QuantizedScaleGradientSizes& sizes);
int64_t quantized_scale_gradient_scratch(const QuantizedScaleGradientSizes& sizes);
void quantized_scale_gradient_pack(const QuantizedScaleGradientPackArgs& args);
void quantized_scale_gradient(const QuantizedScaleGradientTileArgs& args);

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

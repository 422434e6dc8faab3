// tmp
#include "quantized_matmul/simd/entries.h"
namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {
#if defined(MLX_ANVIL_AVX2_PRODUCTS)
int64_t quantized_int_gemm_columns(const QuantizedMatrixView&) { return 0; }
int64_t quantized_int_gemm_bytes(const QuantizedMatrixView&, int64_t) { return 0; }
void quantized_int_gemm_pack(const QuantizedIntGemmPackArgs&) {}
bool quantized_int_gemm(const QuantizedIntGemmArgs&) { return false; }
int64_t quantized_int_gemm_scratch(const QuantizedMatrixView&, int64_t) { return 0; }
#endif
}

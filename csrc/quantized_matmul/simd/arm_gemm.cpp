// Integer GEMM on 64-bit Arm for the product kTransposed (arm_panels.h).
#include "quantized_matmul/simd/entries.h"
#if defined(__ARM_FEATURE_DOTPROD)
#include "quantized_matmul/simd/arm_panels.h"
#include "quantized_matmul/simd/panel_results.h"
#endif

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

#if defined(__ARM_FEATURE_DOTPROD)

int64_t quantized_int_gemm_columns(const QuantizedMatrixView& matrix) {
  return matrix.format.kind == QuantizedKind::kMxfp8 ? 0 : kArmPanel;
}

int64_t quantized_int_gemm_bytes(const QuantizedMatrixView& matrix, int64_t x_rows) {
  return x_rows * quantized_int_row_bytes(matrix);
}

void quantized_int_gemm_pack(const QuantizedIntGemmPackArgs& args) {
  const int64_t row_bytes = quantized_int_row_bytes(args.matrix);
  with_arm_format(args.matrix.format, [&](auto format) {
    with_pieces(args.matrix, [&](auto pieces) {
      with_elements(args.matrix.dtype, [&](auto element) {
        const auto* const x = static_cast<const decltype(element)*>(args.x);
        for (int64_t m = args.first; m < args.first + args.count; ++m) {
          char* const to = static_cast<char*>(args.to) + m * row_bytes;
          args.finite[m] = pack_arm_row<decltype(format), pieces.value>(
              args.matrix, x + m * args.matrix.columns, to);
        }
      });
    });
  });
}

bool quantized_int_gemm(const QuantizedIntGemmArgs& args) {
  with_arm_format(args.matrix.format, [&](auto format) {
    using Format = decltype(format);
    with_pieces(args.matrix, [&](auto pieces) {
      multiply_panels<ArmPanel<Format, pieces.value>>(args, Format::kFactor);
    });
  });
  return true;
}

int64_t quantized_int_gemm_scratch(const QuantizedMatrixView&, int64_t x_rows) {
  return ArmPanel<ArmMxfp4, 2>::scratch(x_rows);
}

#endif

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

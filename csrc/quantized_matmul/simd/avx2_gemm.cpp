// Integer GEMM with AVX2 for the product kTransposed (avx2_panels.h). x of three bytes would take
// more instructions than float32, so that gemm.cpp multiplies it.
#include "quantized_matmul/simd/entries.h"
#if defined(MLX_ANVIL_AVX2_PRODUCTS)
#include "quantized_matmul/simd/avx2_panels.h"
#include "quantized_matmul/simd/panel_results.h"
#endif

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

#if defined(MLX_ANVIL_AVX2_PRODUCTS)

namespace {

template <class Action>
void with_panel_elements(const QuantizedMatrixView& matrix, Action action) {
  with_avx2_format(matrix.format, [&](auto format) {
    using Format = decltype(format);
    pieces_of(matrix) == 1 ? action(Avx2PanelElements<Format, 1>())
                           : action(Avx2PanelElements<Format, 2>());
  });
}

}  // namespace

int64_t quantized_int_gemm_columns(const QuantizedMatrixView& matrix) {
  return matrix.format.kind == QuantizedKind::kMxfp8 || pieces_of(matrix) == 3 ? 0 : kAvx2Panel;
}

int64_t quantized_int_gemm_bytes(const QuantizedMatrixView& matrix, int64_t x_rows) {
  int64_t bytes = 0;
  with_panel_elements(matrix, [&](auto elements) {
    bytes = round_up(x_rows, kAvx2TileRows) / kAvx2TileRows *
            Avx2TileLayout<decltype(elements)>(matrix).bytes();
  });
  return bytes;
}

void quantized_int_gemm_pack(const QuantizedIntGemmPackArgs& args) {
  const QuantizedMatrixView& matrix = args.matrix;
  with_panel_elements(matrix, [&](auto elements) {
    using Elements = decltype(elements);
    const int64_t tile_bytes = Avx2TileLayout<Elements>(matrix).bytes();
    with_elements(matrix.dtype, [&](auto element) {
      const auto* const x = static_cast<const decltype(element)*>(args.x);
      for (int64_t m = args.first; m < args.first + args.count; ++m) {
        char* const tile = static_cast<char*>(args.to) + m / kAvx2TileRows * tile_bytes;
        args.finite[m] =
            pack_avx2_tile_row<Elements>(matrix, x + m * matrix.columns, tile, m % kAvx2TileRows);
      }
    });
  });
}

bool quantized_int_gemm(const QuantizedIntGemmArgs& args) {
  with_panel_elements(args.matrix, [&](auto elements) {
    using Elements = decltype(elements);
    multiply_panels<Avx2Panel<Elements>>(args, Elements::Format::kFactor);
  });
  return true;
}

int64_t quantized_int_gemm_scratch(const QuantizedMatrixView&, int64_t x_rows) {
  return Avx2Panel<Avx2PanelElements<Avx2E2m1, 2>>::scratch(x_rows);
}

#endif

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

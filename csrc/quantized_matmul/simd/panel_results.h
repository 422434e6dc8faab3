// The loop over panels of rows of w, which the integer GEMMs of AVX2 and 64-bit Arm share. For
// kernel files only.
#pragma once

#include "common/simd/panels.h"
#include "quantized_matmul/simd/unpack.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

// Stores the products of all panels, times `factor`. A panel has Panel::kRows rows of w, and totals
// of [x_rows][kRows].
template <class Panel>
void multiply_panels(const QuantizedIntGemmArgs& args, float factor) {
  constexpr int kRows = Panel::kRows;
  Panel panel(args.matrix, static_cast<char*>(args.scratch));
  for (int64_t n = 0; n < args.count; n += kRows) {
    const int64_t left = args.count - n, rows = left < kRows ? left : kRows;
    panel.multiply(args.first + n, rows, static_cast<const char*>(args.x), args.x_rows);
    with_elements(args.matrix.dtype, [&](auto element) {
      auto* const out = static_cast<decltype(element)*>(args.out) + args.first + n;
      for (int64_t m = 0; m < args.x_rows; ++m) {
        const float* const totals = panel.totals() + m * kRows;
        for (int64_t i = 0; i < rows; i += kLanes) {
          store_columns(out + m * args.matrix.outputs, i, rows, load_lanes(totals + i) * factor);
        }
      }
    });
  }
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

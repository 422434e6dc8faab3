// Integer GEMM for many rows of x, on machines with VNNI. x is quantised as in int_rows.h, but with
// one step per group of columns (one byte: per 32 columns of it):
//   x ~= step * X,  X = X0 + 256 X1 (+ 65536 X2), each X_i a signed byte, one step per group
//   sum of (code - offset) * x ~= step * (sum of (code - offset) * X), which is exact
// Relative to the largest element of its step, an element is off by at most 2^-23 (float32), 2^-15,
// or 2^-8 in one byte. A lane is a row of w. Its words are transposed while unpacked into panels of
// bytes, which stay in cache for all rows of x.
//
//   for each panel of kPanelRows rows of w:
//     for each chunk of columns:
//       unpack the panel's codes to bytes; prefetch the next chunk
//       for each tile of rows of x: for each group:
//         for each step of the group:
//           sums = -offset * (sum of X) + codes * X               (vpdpbusd; amx_tiles.h)
//           products += sums * step
//         totals += products * scale + shift * (sum of x)
//     store totals
#include "quantized_matmul/simd/entries.h"
#if defined(__AVX512VNNI__)
#include "quantized_matmul/simd/int_tiles.h"
#endif

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

#if defined(__AVX512VNNI__)

namespace {

struct IntGemmScratch {
  int64_t codes, words, scales, totals;  // byte offset of each part

  IntGemmScratch(const QuantizedMatrixView& matrix)
      : codes(0),
        words(kChunk * kPanelRows),
        scales(words + kChunk * kLanes),
        totals(scales + PanelScales::count(matrix) * sizeof(float)) {}

  // Totals of whole tiles of rows of x.
  int64_t bytes(int64_t x_rows) const {
    return totals + round_up(x_rows, kMostTileRows) * kPanelRows * sizeof(float);
  }
};

template <class Format, class Tiles>
void multiply_panel(const QuantizedIntGemmArgs& args, int64_t first, int64_t count) {
  const QuantizedMatrixView& matrix = args.matrix;
  const IntGemmScratch at(matrix);
  char* const scratch = static_cast<char*>(args.scratch);
  float* const totals = reinterpret_cast<float*>(scratch + at.totals);
  const PanelScales scales(matrix, reinterpret_cast<float*>(scratch + at.scales));
  scales.read<Format>(first, count);
  std::memset(totals, 0, round_up(args.x_rows, Tiles::kRows) * kPanelRows * sizeof(float));

  const GemmRows<Tiles> x(matrix, args.x_rows);
  const int64_t group = matrix.format.group, step = step_columns<Tiles::kPieces>(group);
  CodePanel<Format, Tiles> panel(matrix, first, count,
                                 reinterpret_cast<uint8_t*>(scratch + at.codes),
                                 reinterpret_cast<uint32_t*>(scratch + at.words));
  for (int64_t chunk = 0; chunk < x.chunks; ++chunk) {
    const int64_t column = chunk * kChunk;
    const int64_t columns = matrix.columns - column < kChunk ? matrix.columns - column : kChunk;
    panel.unpack(column, columns);
    const int64_t next = chunk + 1 < x.chunks ? column + kChunk : 0;
    for (int64_t tile = 0; tile < x.tiles; ++tile) {
      panel.prefetch(next, tile, x.tiles);
      const int64_t row = tile * Tiles::kRows, left = args.x_rows - row;
      const char* const packed = static_cast<const char*>(args.x) + x.at(chunk, tile);
      const IntTile<Tiles> products = {packed,
                                       x.factors(packed),
                                       panel.codes(),
                                       scales.from(column / group),
                                       totals + row * kPanelRows,
                                       columns / group,
                                       group / step,
                                       step / kRun};
      add_products(products, left);
    }
  }
  with_elements(matrix.dtype, [&](auto element) {
    auto* const out = static_cast<decltype(element)*>(args.out) + first;
    for (int64_t m = 0; m < args.x_rows; ++m) {
      for (int64_t n = 0; n < count; n += kLanes) {
        store_columns(out + m * matrix.outputs, n, count, load_lanes(totals + m * kPanelRows + n));
      }
    }
  });
}

}  // namespace

int64_t quantized_int_gemm_columns(const QuantizedMatrixView& matrix) {
  return matrix.format.kind == QuantizedKind::kMxfp8 ? 0 : kPanelRows;
}

int64_t quantized_int_gemm_bytes(const QuantizedMatrixView& matrix, int64_t x_rows) {
  int64_t bytes = 0;
  with_tiles(matrix,
             [&](auto tiles) { bytes = GemmRows<decltype(tiles)>(matrix, x_rows).bytes(); });
  return bytes;
}

void quantized_int_gemm_pack(const QuantizedIntGemmPackArgs& args) {
  with_int_format(args.matrix.format, [&](auto format) {
    with_tiles(args.matrix,
               [&](auto tiles) { pack_tiles<decltype(format), decltype(tiles)>(args); });
  });
}

bool quantized_int_gemm(const QuantizedIntGemmArgs& args) {
  with_int_format(args.matrix.format, [&](auto format) {
    with_tiles(args.matrix, [&](auto tiles) {
      using Tiles = decltype(tiles);
      const typename Tiles::Registers registers(
          step_columns<Tiles::kPieces>(args.matrix.format.group));
      for (int64_t n = 0; n < args.count; n += kPanelRows) {
        const int64_t left = args.count - n;
        multiply_panel<decltype(format), Tiles>(args, args.first + n,
                                                left < kPanelRows ? left : kPanelRows);
      }
    });
  });
  return true;
}

int64_t quantized_int_gemm_scratch(const QuantizedMatrixView& matrix, int64_t x_rows) {
  return IntGemmScratch(matrix).bytes(x_rows);
}

// Those are in avx2_gemm.cpp and arm_gemm.cpp.
#elif !defined(MLX_ANVIL_AVX2_PRODUCTS) && !defined(__ARM_FEATURE_DOTPROD)

int64_t quantized_int_gemm_columns(const QuantizedMatrixView&) {
  return 0;
}
int64_t quantized_int_gemm_bytes(const QuantizedMatrixView&, int64_t) {
  return 0;
}
void quantized_int_gemm_pack(const QuantizedIntGemmPackArgs&) {}
bool quantized_int_gemm(const QuantizedIntGemmArgs&) {
  return false;
}
int64_t quantized_int_gemm_scratch(const QuantizedMatrixView&, int64_t) {
  return 0;
}

#endif

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

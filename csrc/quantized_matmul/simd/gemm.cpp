// GEMM for many rows of x: tiles of W are dequantised into panels (common/simd/panels.h) that stay
// in cache, and multiplied by all rows of x.
//
//   for each panel of kPanel rows of W (kTransposed), or each kDepth rows of W (kPlain):
//     dequantise into panels, about kDepth deep
//     for each tile of rows of x: multiply the tile by the panel; add to the result tile
//   convert the result tile to its dtype
#include "common/simd/panels.h"
#include "quantized_matmul/simd/entries.h"
#include "quantized_matmul/simd/unpack.h"

namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE {

namespace {

// Depth of the right operand per pass. With a tile of 128 columns it takes 128 KiB, which fits in
// L2.
constexpr int64_t kDepth = 256;

// Dequantises blocks [first, first + count) of the row last read by `scales`, in lane order.
template <class Format>
void dequantize(const uint32_t* row,
                int64_t units,
                const RowScales& scales,
                int64_t first,
                int64_t count,
                LaneRows to) {
  using BlockUnits = Units<Format::kBits>;
  constexpr int kValues = BlockUnits::kValues;
  for (int64_t b = 0; b < count; ++b) {
    const int64_t unit = (first + b) * kLanes;
    BlockUnits codes;
    codes.load(row + unit * BlockUnits::kWords, units - unit);
    const f32v scale = scales.scale(first + b);
    f32v bias{};
    if constexpr (Format::kHasBiases) {
      bias = scales.bias(first + b);
    }
    float* const out = to.data + b * (kValues / 2) * to.pair_step;
    unroll<kValues>([&](auto i) {
      const f32v value = Format::value(codes.template shifted<i.value>()) * scale + bias;
      store_lanes(out + i.value / 2 * to.pair_step + i.value % 2 * kLanes, value);
    });
  }
}

// Multiplies the rows of x by one panel of the right operand, from column `column` of x on.
void multiply_rows_of_x(const QuantizedGemmArgs& args,
                        int64_t column,
                        int64_t depth,
                        const float* right,
                        Panels result,
                        int64_t panel) {
  for (int64_t m = 0; m < args.x_rows; m += kTileRows) {
    const LeftOperand left = {
        args.x.data + m * args.x.row_step + column / kPanel * args.x.pair_step, args.x.pair_step,
        kPanel};
    const int64_t rows = args.x_rows - m < kTileRows ? args.x_rows - m : kTileRows;
    float* const out = result.at(m, panel);
    if (column == 0) {
      const float one = 1.0f;
      multiply<Words::kFloat32, Accumulate::kNone>(left, right, rows, kPanel, depth, out, &one);
    } else {
      multiply<Words::kFloat32, Accumulate::kAdd>(left, right, rows, kPanel, depth, out);
    }
  }
}

struct GemmScratch {
  Panels result;
  Panels right;
  float* rows;  // kPanel rows of W before the transposition
  float* scales;
};

// Blocks that make up about kDepth columns.
template <class Format>
constexpr int64_t depth_blocks() {
  constexpr int64_t columns = Units<Format::kBits>::kValues * kLanes;
  return columns < kDepth ? kDepth / columns : 1;
}

template <class Format>
constexpr int64_t depth_columns() {
  return depth_blocks<Format>() * Units<Format::kBits>::kValues * kLanes;
}

// Panels of the result tile.
template <class Format>
int64_t result_panels(QuantizedProduct product, int64_t count) {
  return product == QuantizedProduct::kTransposed
             ? panel_count(count)
             : count * Units<Format::kBits>::kValues * kLanes / kPanel;
}

struct ScratchSizes {
  int64_t result, right, rows, scales;
};

template <class Format>
ScratchSizes scratch_sizes(const QuantizedMatrixView& matrix,
                           QuantizedProduct product,
                           int64_t count,
                           int64_t x_rows) {
  const bool transposed = product == QuantizedProduct::kTransposed;
  const int64_t panels = result_panels<Format>(product, count);
  return {panels * round_up(x_rows, kTileRows) * kPanel,
          transposed ? depth_columns<Format>() * kPanel : panels * kDepth * kPanel,
          transposed ? depth_columns<Format>() * kPanel : 0, RowScales::scratch(matrix)};
}

template <class Format>
GemmScratch take_scratch(const QuantizedGemmArgs& args) {
  const ScratchSizes sizes =
      scratch_sizes<Format>(args.matrix, args.product, args.count, args.x_rows);
  float* const right = args.scratch + sizes.result;
  const bool transposed = args.product == QuantizedProduct::kTransposed;
  return {{args.scratch, round_up(args.x_rows, kTileRows)},
          {right, transposed ? depth_columns<Format>() : kDepth},
          right + sizes.right,
          right + sizes.right + sizes.rows};
}

// Multiplies by rows [first, first + count) of W, transposed while packed into panels. The sums run
// over columns in lane order, as x is stored.
template <class Format>
void gemm_transposed(const QuantizedGemmArgs& args, const GemmScratch& scratch) {
  using BlockUnits = Units<Format::kBits>;
  constexpr int64_t kBlock = BlockUnits::kValues * kLanes;
  const int64_t units = args.matrix.columns / BlockUnits::kValues;
  const int64_t blocks = (units + kLanes - 1) / kLanes;
  RowScales scales(args.matrix, BlockUnits::kValues, scratch.scales);
  for (int64_t panel = 0; panel < panel_count(args.count); ++panel) {
    const int64_t n = panel * kPanel;
    const int64_t rows = args.count - n < kPanel ? args.count - n : kPanel;
    for (int64_t block = 0; block < blocks; block += depth_blocks<Format>()) {
      const int64_t left = blocks - block;
      const int64_t count = left < depth_blocks<Format>() ? left : depth_blocks<Format>();
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t row = args.first + n + r;
        scales.read_blocks(row, block, count);
        dequantize<Format>(args.matrix.weights.w + row * units * BlockUnits::kWords, units, scales,
                           block, count, {scratch.rows + r * count * kBlock, 0, kPanel});
      }
      pack_right_transposed<Words::kFloat32>(Source<float>{scratch.rows, count * kBlock, 1}, rows,
                                             count * kBlock, scratch.right);
      multiply_rows_of_x(args, block * kBlock, count * kBlock, scratch.right.data, scratch.result,
                         panel);
    }
  }
}

// Multiplies by blocks [first, first + count) of W's rows, which are rows of panels as they are.
template <class Format>
void gemm_plain(const QuantizedGemmArgs& args, const GemmScratch& scratch) {
  using BlockUnits = Units<Format::kBits>;
  const int64_t units = args.matrix.columns / BlockUnits::kValues;
  RowScales scales(args.matrix, BlockUnits::kValues, scratch.scales);
  for (int64_t first = 0; first < args.matrix.outputs; first += kDepth) {
    const int64_t left = args.matrix.outputs - first;
    const int64_t depth = left < kDepth ? left : kDepth;
    for (int64_t r = 0; r < depth; ++r) {
      scales.read_blocks(first + r, args.first, args.count);
      dequantize<Format>(args.matrix.weights.w + (first + r) * units * BlockUnits::kWords, units,
                         scales, args.first, args.count,
                         {scratch.right.at(r, 0), kPanel, scratch.right.rows * kPanel});
    }
    for (int64_t panel = 0; panel < result_panels<Format>(args.product, args.count); ++panel) {
      multiply_rows_of_x(args, first, depth, scratch.right.at(0, panel), scratch.result, panel);
    }
  }
}

}  // namespace

void quantized_gemm_kernel(const QuantizedGemmArgs& args) {
  with_format(args.matrix.format, [&](auto format) {
    using Format = decltype(format);
    const GemmScratch scratch = take_scratch<Format>(args);
    const bool transposed = args.product == QuantizedProduct::kTransposed;
    transposed ? gemm_transposed<Format>(args, scratch) : gemm_plain<Format>(args, scratch);
    // Store the tile's columns of the result.
    const int values = transposed ? 1 : unit_values(args.matrix.format.bits);
    const int64_t step = transposed ? args.matrix.outputs : args.matrix.columns;
    const int64_t first = transposed ? args.first : args.first * values * kLanes;
    const int64_t most = transposed ? args.count : args.count * values * kLanes;
    const int64_t columns = step - first < most ? step - first : most;
    const int64_t size = element_size(args.matrix.dtype);
    for (int64_t m = 0; m < args.x_rows; ++m) {
      quantized_store_row(args.matrix.dtype, scratch.result.at(m, 0), scratch.result.rows * kPanel,
                          values, columns,
                          static_cast<char*>(args.out) + (m * step + first) * size);
    }
  });
}

int64_t quantized_gemm_scratch(const QuantizedMatrixView& matrix,
                               QuantizedProduct product,
                               int64_t count,
                               int64_t x_rows) {
  int64_t total = 0;
  with_format(matrix.format, [&](auto format) {
    const ScratchSizes sizes = scratch_sizes<decltype(format)>(matrix, product, count, x_rows);
    total = sizes.result + sizes.right + sizes.rows + sizes.scales;
  });
  return total;
}

}  // namespace mlx_anvil::MLX_ANVIL_ISA_NAMESPACE

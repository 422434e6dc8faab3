#include "quantized_matmul/native.h"

#include <algorithm>
#include <cstring>

#include "common/parallel.h"
#include "quantized_matmul/gemv_operand.h"

namespace mlx_anvil {

namespace {

// Rows of x for which the panels are made at once.
constexpr int64_t kGemmRows = 512;
// Columns of a tile of the result, about.
constexpr int64_t kTileColumns = 128;

QuantizedMatrixView matrix_of_batch(const QuantizedFormat& format,
                                    QuantizedDtype dtype,
                                    const QuantizedSizes& sizes,
                                    const QuantizedWeights& all,
                                    int64_t batch) {
  const int64_t words = sizes.columns * format.bits / 32, groups = sizes.columns / format.group;
  const int64_t before = batch * sizes.outputs;
  QuantizedWeights weights;
  weights.w = all.w + before * words;
  weights.scales =
      at(all.scales, before * groups * (format.has_biases() ? element_size(dtype) : 1));
  if (all.biases) {
    weights.biases = at(all.biases, before * groups * element_size(dtype));
  }
  return {format, dtype, sizes.columns, sizes.outputs, weights};
}

// ---- up to 8 rows -------------------------------------------------------------------------------

// result(first, count) gives [rows][count] for rows [first, first + count) of the matrix.
template <class Result>
void gemv_in_parallel(const QuantizedMatrixView& matrix, int64_t rows, void* out, Result result) {
  const QuantizedCpuKernels& kernels = quantized_cpu_kernels();
  parallel_for(matrix.outputs, gemv_grain(matrix), [&](int64_t begin, int64_t end) {
    const Floats results = result(begin, end - begin);
    const int64_t size = element_size(matrix.dtype);
    for (int64_t m = 0; m < rows; ++m) {
      kernels.store_dense(matrix.dtype, results.get() + m * (end - begin), end - begin,
                          at(out, (m * matrix.outputs + begin) * size));
    }
  });
}

// ---- many rows, both products -------------------------------------------------------------------

void gemm(const QuantizedMatrixView& matrix,
          QuantizedProduct product,
          const void* x,
          int64_t rows,
          void* out) {
  const QuantizedCpuKernels& kernels = quantized_cpu_kernels();
  const bool transposed = product == QuantizedProduct::kTransposed;
  const int values = unit_values(matrix.format.bits);
  const int64_t block = int64_t{values} * kernels.lanes;
  const int64_t x_columns = transposed ? matrix.columns : matrix.outputs;
  const int64_t padded = round_up(x_columns, transposed ? block : kernels.panel);
  const int64_t most_rows = round_up(std::min(rows, kGemmRows), kernels.tile_rows);
  const Floats panels = floats(most_rows * padded);
  const int64_t size = element_size(matrix.dtype);

  // Tiles in units of columns (transposed) or blocks.
  const int64_t items = transposed ? matrix.outputs : ceil_div(matrix.columns, block);
  const int64_t tile = transposed ? kTileColumns : std::max<int64_t>(1, kTileColumns / block);
  for (int64_t first_row = 0; first_row < rows; first_row += kGemmRows) {
    const int64_t count = std::min(kGemmRows, rows - first_row);
    const int64_t panel_rows = round_up(count, kernels.tile_rows);
    const LaneRows packed = {panels.get(), kernels.panel, panel_rows * kernels.panel};
    parallel_for(panel_rows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; ++m) {
        // Rows beyond the last are multiplied too, and their results left alone.
        kernels.load_row(matrix.dtype, at(x, (first_row + m) * x_columns * size),
                         m < count ? x_columns : 0, transposed ? values : 1, padded / kernels.lanes,
                         packed.data + m * packed.row_step, packed.pair_step);
      }
    });
    const int64_t out_columns = transposed ? matrix.outputs : matrix.columns;
    parallel_for(ceil_div(items, tile), 1, [&](int64_t begin, int64_t end) {
      const Floats scratch = floats(kernels.gemm_scratch(matrix, product, tile, count));
      for (int64_t t = begin; t < end; ++t) {
        kernels.gemm({matrix, product, t * tile, std::min(tile, items - t * tile), count, packed,
                      at(out, first_row * out_columns * size), scratch.get()});
      }
    });
  }
}

}  // namespace

void quantized_matmul_native(const QuantizedMatmulArgs& args) {
  const QuantizedSizes& sizes = args.sizes;
  const bool transposed = args.product == QuantizedProduct::kTransposed;
  const int64_t x_columns = transposed ? sizes.columns : sizes.outputs;
  const int64_t out_columns = transposed ? sizes.outputs : sizes.columns;
  if (sizes.batch * sizes.rows * out_columns == 0) {
    return;
  }
  const int64_t size = element_size(args.dtype);
  if (x_columns == 0) {
    std::memset(args.out, 0, sizes.batch * sizes.rows * out_columns * size);
    return;
  }
  for (int64_t batch = 0; batch < sizes.batch; ++batch) {
    const QuantizedMatrixView matrix =
        matrix_of_batch(args.format, args.dtype, sizes, args.weights, batch);
    const void* const x = at(args.x, batch * sizes.rows * x_columns * size);
    void* const out = at(args.out, batch * sizes.rows * out_columns * size);
    if (sizes.rows > kQuantizedGemvRows) {
      gemm(matrix, args.product, x, sizes.rows, out);
      continue;
    }
    if (!transposed) {
      quantized_plain_gemv_native(matrix, x, sizes.rows, out);
      continue;
    }
    const GemvOperand operand(matrix, x, sizes.rows);
    gemv_in_parallel(matrix, sizes.rows, out, [&](int64_t first, int64_t count) {
      return operand.multiply(matrix, first, count);
    });
  }
}

void quantized_swiglu_native(const QuantizedSwigluArgs& args) {
  const QuantizedSizes& sizes = args.sizes;
  if (sizes.rows * sizes.outputs == 0) {
    return;
  }
  const QuantizedMatrixView gate = matrix_of_batch(args.format, args.dtype, sizes, args.gate, 0);
  const QuantizedMatrixView up = matrix_of_batch(args.format, args.dtype, sizes, args.up, 0);
  const int64_t size = element_size(args.dtype);
  // More rows than the op sends here come from a compiled graph that is used for other shapes.
  for (int64_t first_row = 0; first_row < sizes.rows; first_row += kQuantizedGemvRows) {
    const int64_t rows = std::min<int64_t>(kQuantizedGemvRows, sizes.rows - first_row);
    const GemvOperand operand(gate, at(args.x, first_row * sizes.columns * size), rows);
    void* const out = at(args.out, first_row * sizes.outputs * size);
    gemv_in_parallel(gate, rows, out, [&](int64_t first, int64_t count) {
      Floats gates = operand.multiply(gate, first, count);
      const Floats ups = operand.multiply(up, first, count);
      quantized_cpu_kernels().silu_gate(gates.get(), ups.get(), operand.rows() * count);
      return gates;
    });
  }
}

}  // namespace mlx_anvil

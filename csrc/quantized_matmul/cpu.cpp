#include "quantized_matmul/cpu.h"

#include <algorithm>
#include <cstring>

#include "common/parallel.h"
#include "quantized_matmul/gemv_operand.h"
#include "quantized_matmul/large_rows.h"

namespace mlx_anvil {

namespace {

// result(first, count) returns [rows][count] for rows [first, first + count) of the matrix.
template <class Result>
void gemv_in_parallel(const QuantizedMatrixView& matrix, int64_t rows, void* out, Result result) {
  parallel_for(matrix.outputs, gemv_grain(matrix), [&](int64_t begin, int64_t end) {
    const Floats results = result(begin, end - begin);
    store_results(matrix.dtype, results.get(), rows, begin, end - begin, out, matrix.outputs);
  });
}

}  // namespace

QuantizedMatrixView matrix_of_batch(const QuantizedFormat& format,
                                    KernelDtype dtype,
                                    int64_t columns,
                                    int64_t outputs,
                                    const QuantizedWeights& all,
                                    int64_t batch) {
  const int64_t words = columns * format.bits / 32, groups = columns / format.group;
  const int64_t before = batch * outputs;
  const int64_t before_bytes = before * groups * scale_size(format, all);
  QuantizedWeights weights = all;
  weights.w += before * words;
  weights.scales = at(all.scales, before_bytes);
  if (all.biases) {
    weights.biases = at(all.biases, before_bytes);
  }
  return {format, dtype, columns, outputs, weights};
}

void quantized_matmul_cpu(const QuantizedMatmulArgs& args) {
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
        matrix_of_batch(args.format, args.dtype, sizes.columns, sizes.outputs, args.weights, batch);
    const void* const x = at(args.x, batch * sizes.rows * x_columns * size);
    void* const out = at(args.out, batch * sizes.rows * out_columns * size);
    if (sizes.rows > kQuantizedGemvRows || !transposed) {
      const DividedRows divided(args.dtype, x, sizes.rows, x_columns);
      if (sizes.rows > kQuantizedGemvRows) {
        quantized_gemm_cpu(matrix, args.product, divided.x(), sizes.rows, out);
      } else {
        quantized_plain_gemv_cpu(matrix, divided.x(), sizes.rows, out);
      }
      divided.restore(out, out_columns);
      continue;
    }
    const GemvOperand operand(matrix, x, sizes.rows);
    gemv_in_parallel(matrix, sizes.rows, out, [&](int64_t first, int64_t count) {
      return operand.multiply(matrix, first, count);
    });
  }
}

void quantized_products_cpu(const QuantizedProductsArgs& args) {
  struct Part {
    QuantizedMatrixView matrix;
    int64_t begin, end;  // its rows among those of all matrices
    void* out;
  };
  std::vector<Part> parts;
  int64_t total = 0;
  for (const QuantizedProductArgs& product : args.products) {
    const QuantizedMatrixView matrix = {args.format, args.dtype, args.columns, product.outputs,
                                        product.weights};
    parts.push_back({matrix, total, total + product.outputs, product.out});
    total += product.outputs;
  }
  const int64_t size = element_size(args.dtype);
  for (int64_t first_row = 0; first_row < args.rows; first_row += kQuantizedGemvRows) {
    const int64_t rows = std::min<int64_t>(kQuantizedGemvRows, args.rows - first_row);
    const QuantizedMatrixView& any = parts[0].matrix;
    const GemvOperand operand(any, at(args.x, first_row * args.columns * size), rows);
    parallel_for(total, gemv_grain(any), [&](int64_t begin, int64_t end) {
      for (const Part& part : parts) {
        const int64_t first = std::max(begin, part.begin), last = std::min(end, part.end);
        if (first < last) {
          const Floats results = operand.multiply(part.matrix, first - part.begin, last - first);
          void* const out = at(part.out, first_row * part.matrix.outputs * size);
          store_results(args.dtype, results.get(), rows, first - part.begin, last - first, out,
                        part.matrix.outputs);
        }
      }
    });
  }
}

void quantized_swiglu_cpu(const QuantizedSwigluArgs& args) {
  const QuantizedSizes& sizes = args.sizes;
  if (sizes.rows * sizes.outputs == 0) {
    return;
  }
  const QuantizedMatrixView gate =
      matrix_of_batch(args.format, args.dtype, sizes.columns, sizes.outputs, args.gate, 0);
  const QuantizedMatrixView up =
      matrix_of_batch(args.format, args.dtype, sizes.columns, sizes.outputs, args.up, 0);
  const int64_t size = element_size(args.dtype);
  // The op sends at most kQuantizedGemvRows rows, but a shapeless compiled graph may see more.
  for (int64_t first_row = 0; first_row < sizes.rows; first_row += kQuantizedGemvRows) {
    const int64_t rows = std::min<int64_t>(kQuantizedGemvRows, sizes.rows - first_row);
    const GemvOperand operand(gate, at(args.x, first_row * sizes.columns * size), rows);
    void* const out = at(args.out, first_row * sizes.outputs * size);
    gemv_in_parallel(gate, rows, out, [&](int64_t first, int64_t count) {
      Floats gates = operand.multiply(gate, first, count);
      const Floats ups = operand.multiply(up, first, count);
      quantized_cpu_kernels().gate(args.options, gates.get(), ups.get(), operand.rows() * count);
      return gates;
    });
  }
}

}  // namespace mlx_anvil

#include "quantized_matmul/native.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "common/parallel.h"
#include "quantized_matmul/native_support.h"

namespace mlx_anvil {

namespace {

// Rows of x for which the panels are made at once.
constexpr int64_t kGemmRows = 512;
// Columns of a tile of the result, about.
constexpr int64_t kTileColumns = 128;
// Codes that are worth waking a thread for.
constexpr int64_t kGrainCodes = 1 << 16;

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

// Rows of x as a kernel reads them, filled up to a power of two with zeros.
class GemvOperand {
 public:
  GemvOperand(const QuantizedMatrixView& matrix, const void* from, int64_t given_rows)
      : GemvOperand(matrix, from, given_rows, kernels().int_row_bytes(matrix) > 0) {}

  int64_t rows() const { return rows_; }

  // [rows()][count] for rows [first, first + count) of the matrix, which may be another one of the
  // same format.
  Floats multiply(const QuantizedMatrixView& matrix, int64_t first, int64_t count) const {
    Floats out = floats(rows_ * count);
    const Floats scratch =
        floats(integers_ ? kernels().int_gemv_scratch(matrix) : kernels().gemv_scratch(matrix));
    const QuantizedGemvArgs args = {matrix,   first,       count,     rows_,
                                    x_.get(), sums_.get(), out.get(), scratch.get()};
    integers_ ? kernels().int_gemv(args) : kernels().gemv(args);
    for (const auto& [row, operand] : not_finite_) {
      const Floats one = operand->multiply(matrix, first, count);
      std::copy_n(one.get(), count, out.get() + row * count);
    }
    return out;
  }

 private:
  GemvOperand(const QuantizedMatrixView& matrix,
              const void* from,
              int64_t given_rows,
              bool integers)
      : integers_(integers), rows_(power_of_two_rows(given_rows)) {
    integers ? pack_integers(matrix, from, given_rows) : pack_floats(matrix, from, given_rows);
  }

  static const QuantizedCpuKernels& kernels() { return quantized_cpu_kernels(); }

  static int64_t vectors_of(const QuantizedMatrixView& matrix) {
    const int values = unit_values(matrix.format.bits);
    return ceil_div(matrix.columns, int64_t{values} * kernels().lanes) * values;
  }

  static const void* row_of(const QuantizedMatrixView& matrix, const void* from, int64_t m) {
    return at(from, m * matrix.columns * element_size(matrix.dtype));
  }

  void pack_floats(const QuantizedMatrixView& matrix, const void* from, int64_t given_rows) {
    const int values = unit_values(matrix.format.bits);
    const int64_t vectors = vectors_of(matrix), step = vectors * kernels().lanes;
    const int64_t sums_step = step / values;
    x_ = floats(rows_ * step);
    sums_ = floats(rows_ * sums_step);
    std::fill(x_.get() + given_rows * step, x_.get() + rows_ * step, 0.0f);
    std::fill(sums_.get() + given_rows * sums_step, sums_.get() + rows_ * sums_step, 0.0f);
    for (int64_t m = 0; m < given_rows; ++m) {
      float* const row = x_.get() + m * step;
      kernels().load_row(matrix.dtype, row_of(matrix, from, m), matrix.columns, values, vectors,
                         row, 2 * kernels().lanes);
      kernels().block_sums(row, values, vectors / values, sums_.get() + m * sums_step);
    }
  }

  void pack_integers(const QuantizedMatrixView& matrix, const void* from, int64_t given_rows) {
    const int64_t row_floats = kernels().int_row_bytes(matrix) / sizeof(float);
    const int64_t vectors =
        round_up(ceil_div(matrix.columns, kernels().lanes), kQuantizedIntVectors);
    const Floats row = floats(vectors * kernels().lanes);
    x_ = floats(rows_ * row_floats);
    for (int64_t m = 0; m < rows_; ++m) {
      if (m < given_rows) {
        kernels().load_row(matrix.dtype, row_of(matrix, from, m), matrix.columns, 1, vectors,
                           row.get(), 2 * kernels().lanes);
      }
      float* const to = x_.get() + m * row_floats;
      if (m >= given_rows || !kernels().int_pack(matrix, row.get(), to)) {
        std::memset(to, 0, row_floats * sizeof(float));
        if (m < given_rows) {
          not_finite_.emplace_back(m, std::unique_ptr<GemvOperand>(new GemvOperand(
                                          matrix, row_of(matrix, from, m), 1, false)));
        }
      }
    }
  }

  bool integers_;
  int64_t rows_;
  Floats x_, sums_;
  std::vector<std::pair<int64_t, std::unique_ptr<GemvOperand>>> not_finite_;
};

// result(first, count) gives [rows][count] for rows [first, first + count) of the matrix.
template <class Result>
void gemv_in_parallel(const QuantizedMatrixView& matrix, int64_t rows, void* out, Result result) {
  const QuantizedCpuKernels& kernels = quantized_cpu_kernels();
  const int64_t grain = std::max<int64_t>(1, kGrainCodes / std::max<int64_t>(1, matrix.columns));
  parallel_for(matrix.outputs, grain, [&](int64_t begin, int64_t end) {
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

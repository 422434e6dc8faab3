// GEMM: quantized products of many rows of x.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "common/parallel.h"
#include "quantized_matmul/cpu_support.h"

namespace mlx_anvil {

namespace {

// Rows of x per pass over the matrix. Dequantised panels are reused for all of them.
constexpr int64_t kGemmRows = 512;
// Minimum rows of x per thread when packing.
constexpr int64_t kPackGrain = 4;
// Approximate width of a tile of the result, in columns.
constexpr int64_t kTileColumns = 128;

// Bytes per row of x and of the result.
struct RowSizes {
  int64_t x, out;

  RowSizes(const QuantizedMatrixView& matrix, QuantizedProduct product)
      : x(matrix.columns * element_size(matrix.dtype)),
        out(matrix.outputs * element_size(matrix.dtype)) {
    if (product == QuantizedProduct::kPlain) {
      std::swap(x, out);
    }
  }
};

void multiply_floats(const QuantizedMatrixView& matrix,
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
  const RowSizes bytes(matrix, product);

  // Tiles are in units of columns (transposed) or blocks (plain).
  const int64_t items = transposed ? matrix.outputs : ceil_div(matrix.columns, block);
  const int64_t tile = transposed ? kTileColumns : std::max<int64_t>(1, kTileColumns / block);
  for (int64_t first_row = 0; first_row < rows; first_row += kGemmRows) {
    const int64_t count = std::min(kGemmRows, rows - first_row);
    const int64_t panel_rows = round_up(count, kernels.tile_rows);
    const LaneRows packed = {panels.get(), kernels.panel, panel_rows * kernels.panel};
    parallel_for(panel_rows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; ++m) {
        // Padding rows are multiplied too, and their results discarded.
        kernels.load_row(matrix.dtype, at(x, (first_row + m) * bytes.x), m < count ? x_columns : 0,
                         transposed ? values : 1, padded / kernels.lanes,
                         packed.data + m * packed.row_step, packed.pair_step);
      }
    });
    parallel_for(ceil_div(items, tile), 1, [&](int64_t begin, int64_t end) {
      const Floats scratch = floats(kernels.gemm_scratch(matrix, product, tile, count));
      for (int64_t t = begin; t < end; ++t) {
        kernels.gemm({matrix, product, t * tile, std::min(tile, items - t * tile), count, packed,
                      at(out, first_row * bytes.out), scratch.get()});
      }
    });
  }
}

// Recomputes in float32 the rows of x that have no integer representation.
void replace_rows(const QuantizedMatrixView& matrix,
                  QuantizedProduct product,
                  const void* x,
                  const std::vector<uint8_t>& finite,
                  void* out) {
  const RowSizes bytes(matrix, product);
  const int64_t rows = std::count(finite.begin(), finite.end(), 0);
  if (rows == 0) {
    return;
  }
  std::vector<char> some_x(rows * bytes.x), some_out(rows * bytes.out);
  // Calls row(m, i) for each such row: m is its index in x, i its index among them.
  const auto for_each_row = [&](auto row) {
    for (size_t m = 0, i = 0; m < finite.size(); ++m) {
      if (!finite[m]) {
        row(m, i++);
      }
    }
  };
  for_each_row([&](int64_t m, int64_t i) {
    std::memcpy(some_x.data() + i * bytes.x, at(x, m * bytes.x), bytes.x);
  });
  multiply_floats(matrix, product, some_x.data(), rows, some_out.data());
  for_each_row([&](int64_t m, int64_t i) {
    std::memcpy(at(out, m * bytes.out), some_out.data() + i * bytes.out, bytes.out);
  });
}

// Returns false if the format has no integer kernel on this machine, or if the matrix has a scale
// or bias that is not finite.
bool multiply_integers(const QuantizedMatrixView& matrix,
                       QuantizedProduct product,
                       const void* x,
                       int64_t rows,
                       void* out) {
  const QuantizedCpuKernels& kernels = quantized_cpu_kernels();
  const bool transposed = product == QuantizedProduct::kTransposed;
  const QuantizedIntGemm& gemm = transposed ? kernels.int_gemm : kernels.int_plain_gemm;
  const int64_t columns = transposed ? matrix.outputs : matrix.columns;
  const int64_t tile = gemm.columns(matrix);
  if (tile == 0) {
    return false;
  }
  const RowSizes bytes(matrix, product);
  const int64_t rows_of_pass =
      packed_rows_of_pass(gemm.packed_bytes(matrix, kGemmRows) / kGemmRows, rows, kGemmRows);
  for (int64_t first_row = 0; first_row < rows; first_row += rows_of_pass) {
    const int64_t count = std::min(rows_of_pass, rows - first_row);
    const void* const from = at(x, first_row * bytes.x);
    void* const to = at(out, first_row * bytes.out);
    const Floats packed = floats(gemm.packed_bytes(matrix, count) / sizeof(float));
    std::vector<uint8_t> finite(count);
    parallel_for(count, kPackGrain, [&](int64_t begin, int64_t end) {
      gemm.pack({matrix, from, count, begin, end - begin, packed.get(), finite.data()});
    });
    std::atomic<bool> done = true;
    parallel_for(ceil_div(columns, tile), 1, [&](int64_t begin, int64_t end) {
      const Floats scratch = floats(gemm.scratch(matrix, count) / sizeof(float));
      if (!gemm.multiply({matrix, begin * tile, std::min(end * tile, columns) - begin * tile, count,
                          packed.get(), to, scratch.get()})) {
        done = false;
      }
    });
    if (!done) {
      return false;
    }
    replace_rows(matrix, product, from, finite, to);
  }
  return true;
}

}  // namespace

void quantized_gemm_cpu(const QuantizedMatrixView& matrix,
                        QuantizedProduct product,
                        const void* x,
                        int64_t rows,
                        void* out) {
  if (!multiply_integers(matrix, product, x, rows, out)) {
    multiply_floats(matrix, product, x, rows, out);
  }
}

}  // namespace mlx_anvil

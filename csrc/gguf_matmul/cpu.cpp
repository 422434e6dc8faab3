#include "gguf_matmul/cpu.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "common/parallel.h"
#include "gguf_matmul/simd/kernels.h"
#include "quantized_matmul/large_rows.h"

namespace mlx_anvil {

namespace {

// Minimum columns of w per thread in a product of few rows, in numbers.
constexpr int64_t kGemvGrain = 1 << 16;
// Rows of x per pass over the matrix.
constexpr int64_t kPassRows = 512;
// Minimum rows of x per thread when packing, and numbers per thread when dequantising.
constexpr int64_t kPackGrain = 4, kRowsGrain = 32768;

Floats bytes_as_floats(int64_t bytes) {
  return floats(ceil_div(bytes, static_cast<int64_t>(sizeof(float))));
}

struct Product {
  const GgufCpuKernels& kernels;
  GgufView matrix;
  QuantizedProduct product;

  bool is_transposed() const { return product == QuantizedProduct::kTransposed; }
  int64_t x_columns() const { return is_transposed() ? matrix.columns : matrix.outputs; }
  int64_t out_columns() const { return is_transposed() ? matrix.outputs : matrix.columns; }
  int64_t x_bytes() const { return x_columns() * element_size(matrix.dtype); }
  int64_t out_bytes() const { return out_columns() * element_size(matrix.dtype); }
};

void multiply_floats(const Product& call, const void* x, int64_t rows, void* out) {
  const GgufCpuKernels& kernels = call.kernels;
  const int64_t tile = call.is_transposed() ? kernels.panel : kGgufSuperblock;
  for (int64_t first = 0; first < rows; first += kPassRows) {
    const int64_t count = std::min(kPassRows, rows - first);
    const Floats packed = floats(kernels.packed_floats(count, call.x_columns()));
    kernels.pack_floats(call.matrix.dtype, at(x, first * call.x_bytes()), count, call.x_columns(),
                        packed.get());
    parallel_for(ceil_div(call.out_columns(), tile), 1, [&](int64_t begin, int64_t end) {
      const Floats scratch = floats(kernels.float_scratch(count));
      const int64_t columns = std::min(end * tile, call.out_columns()) - begin * tile;
      kernels.multiply_floats({call.matrix, call.product, begin * tile, columns, count,
                               packed.get(), at(out, first * call.out_bytes()), scratch.get()});
    });
  }
}

// Computes again, in float32, the rows that the integer kernels cannot: those of x that are not
// `finite`, and those with results that are not, as from a scale that is infinite.
void replace_rows(const Product& call,
                  const void* x,
                  const std::vector<uint8_t>& finite,
                  void* out) {
  std::vector<int64_t> rows;
  for (size_t m = 0; m < finite.size(); ++m) {
    const void* const row = at(out, static_cast<int64_t>(m) * call.out_bytes());
    const float largest =
        quantized_cpu_kernels().largest(call.matrix.dtype, row, call.out_columns());
    if (!finite[m] || !(largest <= std::numeric_limits<float>::max())) {
      rows.push_back(static_cast<int64_t>(m));
    }
  }
  if (rows.empty()) {
    return;
  }
  const int64_t count = static_cast<int64_t>(rows.size());
  std::vector<char> some_x(count * call.x_bytes()), some_out(count * call.out_bytes());
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(some_x.data() + i * call.x_bytes(), at(x, rows[i] * call.x_bytes()),
                call.x_bytes());
  }
  multiply_floats(call, some_x.data(), count, some_out.data());
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(at(out, rows[i] * call.out_bytes()), some_out.data() + i * call.out_bytes(),
                call.out_bytes());
  }
}

// Up to kQuantizedGemvRows rows of x for int_gemv. Rows that are not finite are zero there.
struct PackedRows {
  Floats data;
  std::vector<uint8_t> finite;

  PackedRows(const Product& call, const void* x, int64_t rows) : finite(rows) {
    const int64_t row_bytes = call.kernels.int_row_bytes(call.matrix);
    data = bytes_as_floats(rows * row_bytes);
    for (int64_t m = 0; m < rows; ++m) {
      void* const to = at(static_cast<void*>(data.get()), m * row_bytes);
      finite[m] = call.kernels.int_pack(call.matrix, at(x, m * call.x_bytes()), to);
      if (!finite[m]) {
        std::memset(to, 0, row_bytes);
      }
    }
  }

  // Results [rows][count] for rows [first, first + count) of the matrix.
  Floats multiply(const Product& call, int64_t first, int64_t count) const {
    const int64_t rows = static_cast<int64_t>(finite.size());
    Floats results = floats(rows * count);
    call.kernels.int_gemv({call.matrix, first, count, rows, data.get(), results.get()});
    return results;
  }
};

// result(first, count) returns [rows][count] for rows [first, first + count) of the matrix.
template <class Result>
void in_parallel(const Product& call, int64_t rows, int64_t grain, void* out, Result result) {
  parallel_for(call.matrix.outputs, grain, [&](int64_t begin, int64_t end) {
    const Floats results = result(begin, end - begin);
    store_results(call.matrix.dtype, results.get(), rows, begin, end - begin, out,
                  call.matrix.outputs);
  });
}

int64_t gemv_grain(const Product& call) {
  return std::max<int64_t>(1, kGemvGrain / std::max<int64_t>(1, call.x_columns()));
}

void gemv(const Product& call, const void* x, int64_t rows, void* out) {
  const PackedRows packed(call, x, rows);
  in_parallel(call, rows, gemv_grain(call), out,
              [&](int64_t first, int64_t count) { return packed.multiply(call, first, count); });
  replace_rows(call, x, packed.finite, out);
}

void gemm(const Product& call, const void* x, int64_t rows, void* out) {
  const GgufCpuKernels& kernels = call.kernels;
  const int64_t tile = kernels.gemm_columns, outputs = call.matrix.outputs;
  const int64_t rows_of_pass =
      packed_rows_of_pass(kernels.gemm_bytes(call.matrix, kPassRows) / kPassRows, rows, kPassRows);
  for (int64_t first = 0; first < rows; first += rows_of_pass) {
    const int64_t count = std::min(rows_of_pass, rows - first);
    const void* const from = at(x, first * call.x_bytes());
    void* const to = at(out, first * call.out_bytes());
    const Floats packed = bytes_as_floats(kernels.gemm_bytes(call.matrix, count));
    std::vector<uint8_t> finite(count);
    parallel_for(count, kPackGrain, [&](int64_t begin, int64_t end) {
      kernels.gemm_pack(
          {call.matrix, from, count, begin, end - begin, packed.get(), finite.data()});
    });
    parallel_for(ceil_div(outputs, tile), 1, [&](int64_t begin, int64_t end) {
      const Floats scratch = bytes_as_floats(kernels.gemm_scratch(call.matrix, count));
      kernels.int_gemm({call.matrix, begin * tile, std::min(end * tile, outputs) - begin * tile,
                        count, packed.get(), to, scratch.get()});
    });
    replace_rows(call, from, finite, to);
  }
}

void multiply(const Product& call, const void* x, int64_t rows, void* out) {
  const int64_t row_bytes = call.is_transposed() ? call.kernels.int_row_bytes(call.matrix) : 0;
  if (row_bytes == 0) {
    multiply_floats(call, x, rows, out);
  } else if (rows <= kQuantizedGemvRows) {
    gemv(call, x, rows, out);
  } else {
    gemm(call, x, rows, out);
  }
}

Floats in_floats(KernelDtype dtype, const void* row, int64_t columns) {
  const int64_t lanes = quantized_cpu_kernels().lanes, vectors = 2 * ceil_div(columns, 2 * lanes);
  Floats numbers = floats(vectors * lanes);
  quantized_cpu_kernels().load_row(dtype, row, columns, /*values=*/1, vectors, numbers.get(),
                                   2 * lanes);
  return numbers;
}

Product gated_product(const GgufSwigluArgs& args, const uint8_t* w, KernelDtype dtype) {
  return {gguf_cpu_kernels(),
          {args.kind, dtype, args.activation_bits, args.sizes.columns, args.sizes.outputs, w},
          QuantizedProduct::kTransposed};
}

// Row m as two products in float32, for any numbers.
void swiglu_row(const GgufSwigluArgs& args, int64_t m) {
  const int64_t size = element_size(args.dtype), outputs = args.sizes.outputs;
  const Floats x =
      in_floats(args.dtype, at(args.x, m * args.sizes.columns * size), args.sizes.columns);
  const auto product = [&](const uint8_t* w) {
    const Product call = gated_product(args, w, KernelDtype::kFloat32);
    Floats results = floats(outputs);
    const DividedRows divided(KernelDtype::kFloat32, x.get(), 1, args.sizes.columns);
    multiply(call, divided.x(), 1, results.get());
    divided.restore(results.get(), outputs);
    return results;
  };
  const Floats gate = product(args.gate), up = product(args.up);
  quantized_cpu_kernels().gate(args.options, gate.get(), up.get(), outputs);
  quantized_cpu_kernels().store_dense(args.dtype, gate.get(), outputs,
                                      at(args.out, m * outputs * size));
}

}  // namespace

void gguf_matmul_cpu(const GgufMatmulArgs& args) {
  const QuantizedSizes& sizes = args.sizes;
  for (int64_t batch = 0; batch < sizes.batch; ++batch) {
    Product call = {
        gguf_cpu_kernels(),
        {args.kind, args.dtype, args.activation_bits, sizes.columns, sizes.outputs, args.w},
        args.product};
    call.matrix.w += batch * sizes.outputs * call.matrix.row_bytes();
    void* const out = at(args.out, batch * sizes.rows * call.out_bytes());
    if (sizes.rows * call.out_columns() == 0) {
      continue;
    }
    if (call.x_columns() == 0) {
      std::memset(out, 0, sizes.rows * call.out_bytes());
      continue;
    }
    const void* const x = at(args.x, batch * sizes.rows * call.x_bytes());
    const DividedRows divided(args.dtype, x, sizes.rows, call.x_columns());
    multiply(call, divided.x(), sizes.rows, out);
    divided.restore(out, call.out_columns());
  }
}

void gguf_swiglu_cpu(const GgufSwigluArgs& args) {
  const QuantizedSizes& sizes = args.sizes;
  const int64_t size = element_size(args.dtype);
  if (sizes.rows * sizes.outputs == 0) {
    return;
  }
  if (sizes.columns == 0) {
    std::memset(args.out, 0, sizes.rows * sizes.outputs * size);
    return;
  }
  const Product gate = gated_product(args, args.gate, args.dtype);
  const Product up = gated_product(args, args.up, args.dtype);
  // The op sends at most kQuantizedGemvRows rows, but a shapeless compiled graph may see more.
  for (int64_t first_row = 0; first_row < sizes.rows; first_row += kQuantizedGemvRows) {
    const int64_t rows = std::min<int64_t>(kQuantizedGemvRows, sizes.rows - first_row);
    std::vector<uint8_t> done(rows);
    if (gate.kernels.int_row_bytes(gate.matrix) > 0) {
      const void* const x = at(args.x, first_row * gate.x_bytes());
      void* const out = at(args.out, first_row * gate.out_bytes());
      const PackedRows packed(gate, x, rows);
      in_parallel(gate, rows, gemv_grain(gate), out, [&](int64_t first, int64_t count) {
        Floats gates = packed.multiply(gate, first, count);
        const Floats ups = packed.multiply(up, first, count);
        quantized_cpu_kernels().gate(args.options, gates.get(), ups.get(), rows * count);
        return gates;
      });
      for (int64_t m = 0; m < rows; ++m) {
        const auto largest = [&](const void* row, int64_t columns) {
          return quantized_cpu_kernels().largest(args.dtype, row, columns);
        };
        done[m] = packed.finite[m] &&
                  divisor_of_row(args.dtype, at(x, m * gate.x_bytes()), sizes.columns) == 1.0f &&
                  largest(at(out, m * gate.out_bytes()), sizes.outputs) <=
                      std::numeric_limits<float>::max();
      }
    }
    for (int64_t m = 0; m < rows; ++m) {
      if (!done[m]) {
        swiglu_row(args, first_row + m);
      }
    }
  }
}

void gguf_rows_cpu(const GgufRowsArgs& args) {
  if (args.ids.count * args.columns == 0) {
    return;
  }
  const GgufView matrix = {args.kind, args.dtype, 0, args.columns, args.rows, args.w};
  const int64_t out_bytes = args.columns * element_size(args.dtype);
  const int64_t grain = std::max<int64_t>(1, kRowsGrain / args.columns);
  parallel_for(args.ids.count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint8_t* const row = args.w + args.ids.row(i, args.rows) * matrix.row_bytes();
      gguf_cpu_kernels().dequantize(args.kind, row, 0, args.columns, args.dtype,
                                    at(args.out, i * out_bytes));
    }
  });
}

}  // namespace mlx_anvil

#include "quantized_matmul/gemv_operand.h"

#include <algorithm>
#include <cstring>

#include "quantized_matmul/large_rows.h"

namespace mlx_anvil {

namespace {

// Minimum codes per thread.
constexpr int64_t kGrainCodes = 1 << 16;

const QuantizedCpuKernels& kernels() {
  return quantized_cpu_kernels();
}

int64_t vectors_of(const QuantizedMatrixView& matrix) {
  const int values = unit_values(matrix.format.bits);
  return ceil_div(matrix.columns, int64_t{values} * kernels().lanes) * values;
}

const void* row_of(const QuantizedMatrixView& matrix, const void* from, int64_t m) {
  return at(from, m * matrix.columns * element_size(matrix.dtype));
}

}  // namespace

int64_t gemv_grain(const QuantizedMatrixView& matrix) {
  return std::max<int64_t>(1, kGrainCodes / std::max<int64_t>(1, matrix.columns));
}

GemvOperand::GemvOperand(const QuantizedMatrixView& matrix, const void* from, int64_t given_rows)
    : GemvOperand(matrix, from, given_rows, kernels().int_row_bytes(matrix) > 0) {}

GemvOperand::GemvOperand(const QuantizedMatrixView& matrix,
                         const void* from,
                         int64_t given_rows,
                         bool integers)
    : integers_(integers), rows_(power_of_two_rows(given_rows)) {
  integers ? pack_integers(matrix, from, given_rows) : pack_floats(matrix, from, given_rows);
}

Floats GemvOperand::multiply(const QuantizedMatrixView& matrix,
                             int64_t first,
                             int64_t count) const {
  Floats out = floats(rows_ * count);
  const Floats scratch =
      floats(integers_ ? kernels().int_gemv_scratch(matrix) : kernels().gemv_scratch(matrix));
  const QuantizedGemvArgs args = {matrix,   first,       count,     rows_,
                                  x_.get(), sums_.get(), out.get(), scratch.get()};
  integers_ ? kernels().int_gemv(args) : kernels().gemv(args);
  for (int64_t row : large_) {
    kernels().scale(KernelDtype::kFloat32, out.get() + row * count, count, kLargeNumber);
  }
  for (const auto& [row, operand] : not_finite_) {
    const Floats one = operand->multiply(matrix, first, count);
    std::copy_n(one.get(), count, out.get() + row * count);
  }
  return out;
}

void GemvOperand::divide_if_large(
    const QuantizedMatrixView& matrix, const void* from, int64_t m, float* row, int64_t count) {
  const float divisor = divisor_of_row(matrix.dtype, from, matrix.columns);
  if (divisor != 1.0f) {
    kernels().scale(KernelDtype::kFloat32, row, count, 1.0f / divisor);
    large_.push_back(m);
  }
}

void GemvOperand::pack_floats(const QuantizedMatrixView& matrix,
                              const void* from,
                              int64_t given_rows) {
  const int values = unit_values(matrix.format.bits);
  const int64_t vectors = vectors_of(matrix), step = vectors * kernels().lanes;
  const int64_t sums_step = step / values;
  x_ = floats(rows_ * step);
  sums_ = floats(rows_ * sums_step);
  std::fill(x_.get() + given_rows * step, x_.get() + rows_ * step, 0.0f);
  std::fill(sums_.get() + given_rows * sums_step, sums_.get() + rows_ * sums_step, 0.0f);
  for (int64_t m = 0; m < given_rows; ++m) {
    float* const row = x_.get() + m * step;
    kernels().load_row(matrix.dtype, row_of(matrix, from, m), matrix.columns, values, vectors, row,
                       2 * kernels().lanes);
    divide_if_large(matrix, row_of(matrix, from, m), m, row, step);
    kernels().block_sums(row, values, vectors / values, sums_.get() + m * sums_step);
  }
}

void GemvOperand::pack_integers(const QuantizedMatrixView& matrix,
                                const void* from,
                                int64_t given_rows) {
  const int64_t row_floats = kernels().int_row_bytes(matrix) / sizeof(float);
  const int64_t vectors = round_up(ceil_div(matrix.columns, kernels().lanes), kQuantizedIntVectors);
  const Floats row = floats(vectors * kernels().lanes);
  x_ = floats(rows_ * row_floats);
  for (int64_t m = 0; m < rows_; ++m) {
    if (m < given_rows) {
      kernels().load_row(matrix.dtype, row_of(matrix, from, m), matrix.columns, 1, vectors,
                         row.get(), 2 * kernels().lanes);
      divide_if_large(matrix, row_of(matrix, from, m), m, row.get(), vectors * kernels().lanes);
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

}  // namespace mlx_anvil

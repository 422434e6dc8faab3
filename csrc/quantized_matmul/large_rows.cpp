#include "quantized_matmul/large_rows.h"

#include "common/parallel.h"

namespace mlx_anvil {

namespace {

constexpr int64_t kGrain = 1 << 16;  // minimum elements per thread

}  // namespace

DividedRows::DividedRows(KernelDtype dtype, const void* x, int64_t rows, int64_t columns)
    : dtype_(dtype), x_(x) {
  if (dtype == KernelDtype::kFloat16) {
    return;
  }
  const int64_t row_bytes = columns * element_size(dtype);
  std::vector<uint8_t> is_large(static_cast<size_t>(rows));
  parallel_for(rows, ceil_div(kGrain, columns), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      is_large[row] = divisor_of_row(dtype, at(x, row * row_bytes), columns) != 1.0f;
    }
  });
  for (int64_t row = 0; row < rows; ++row) {
    if (is_large[row]) {
      large_.push_back(row);
    }
  }
  if (large_.empty()) {
    return;
  }
  copy_ = floats(ceil_div(rows * row_bytes, sizeof(float)));
  std::memcpy(copy_.get(), x, rows * row_bytes);
  for (int64_t row : large_) {
    quantized_cpu_kernels().scale(dtype, at(copy_.get(), row * row_bytes), columns,
                                  1.0f / kLargeNumber);
  }
}

void DividedRows::restore(void* out, int64_t columns) const {
  for (int64_t row : large_) {
    quantized_cpu_kernels().scale(dtype_, at(out, row * columns * element_size(dtype_)), columns,
                                  kLargeNumber);
  }
}

}  // namespace mlx_anvil

// Rows of x with numbers so large that sums of codes times x could overflow where the result does
// not: they are multiplied by a power of two, and their results by its inverse.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "quantized_matmul/cpu_support.h"

namespace mlx_anvil {

// Numbers up to this leave room for sums of 2^20 codes of 8 bits times scales of 2^35.
inline constexpr float kLargeNumber = 0x1p64f;

// From a row of x: kLargeNumber where it has to be divided by that, else 1. A row that is not
// finite is left alone.
inline float divisor_of_row(KernelDtype dtype, const void* row, int64_t columns) {
  if (dtype == KernelDtype::kFloat16) {
    return 1.0f;
  }
  const float largest = quantized_cpu_kernels().largest(dtype, row, columns);
  return largest > kLargeNumber && largest <= std::numeric_limits<float>::max() ? kLargeNumber
                                                                                : 1.0f;
}

// x with large rows divided, for products that write results in x's dtype.
class DividedRows {
 public:
  DividedRows(KernelDtype dtype, const void* x, int64_t rows, int64_t columns);

  const void* x() const { return copy_ ? copy_.get() : x_; }

  // Multiplies the rows of the results of x().
  void restore(void* out, int64_t columns) const;

 private:
  const KernelDtype dtype_;
  const void* const x_;
  std::vector<int64_t> large_;  // rows
  Floats copy_;
};

}  // namespace mlx_anvil

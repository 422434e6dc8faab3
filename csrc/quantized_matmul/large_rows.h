// Rows of x so large that a sum of codes times x could overflow although the result does not. They
// are scaled down by a power of two, and their results scaled up.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "quantized_matmul/cpu_support.h"

namespace mlx_anvil {

// Elements up to this leave headroom for sums of 2^20 8-bit codes times scales of 2^35.
inline constexpr float kLargeNumber = 0x1p64f;

// Returns kLargeNumber if the row must be divided by it, else 1. Rows that are not finite are left
// alone.
inline float divisor_of_row(KernelDtype dtype, const void* row, int64_t columns) {
  if (dtype == KernelDtype::kFloat16) {
    return 1.0f;
  }
  const float largest = quantized_cpu_kernels().largest(dtype, row, columns);
  return largest > kLargeNumber && largest <= std::numeric_limits<float>::max() ? kLargeNumber
                                                                                : 1.0f;
}

// x with its large rows divided, for products that write results in x's dtype.
class DividedRows {
 public:
  DividedRows(KernelDtype dtype, const void* x, int64_t rows, int64_t columns);

  const void* x() const { return copy_ ? copy_.get() : x_; }

  // Scales up the result rows that belong to divided rows of x.
  void restore(void* out, int64_t columns) const;

 private:
  const KernelDtype dtype_;
  const void* const x_;
  std::vector<int64_t> large_;  // indices of divided rows
  Floats copy_;
};

}  // namespace mlx_anvil

// Gradients in scales and biases. Threads share panels of rows of w, whose sums do not depend on
// each other.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/parallel.h"
#include "quantized_matmul/cpu.h"
#include "quantized_matmul/large_rows.h"

namespace mlx_anvil {

namespace {

// Rows of x per pass over w. A panel of x then stays in L1 while it is multiplied by all rows of a
// panel of w.
constexpr int64_t kPassRows = 256;
// Minimum products, and minimum packed elements, per thread.
constexpr int64_t kGrainProducts = 1 << 17, kGrainElements = 1 << 14;

// x and y with powers of two moved from rows of x to those of y, where sums of codes times x could
// overflow although their products with y do not.
class BalancedRows {
 public:
  BalancedRows(KernelDtype dtype,
               const void* x,
               int64_t columns,
               const void* y,
               int64_t outputs,
               int64_t rows)
      : x_(x), y_(y) {
    if (dtype == KernelDtype::kFloat16) {
      return;
    }
    const QuantizedCpuKernels& kernels = quantized_cpu_kernels();
    const int64_t x_bytes = columns * element_size(dtype), y_bytes = outputs * element_size(dtype);
    for (int64_t m = 0; m < rows; ++m) {
      if (divisor_of_row(dtype, at(x, m * x_bytes), columns) == 1.0f) {
        continue;
      }
      const float largest = kernels.largest(dtype, at(y, m * y_bytes), outputs);
      if (!std::isfinite(largest)) {
        continue;
      }
      if (!own_x_) {
        own_x_ = copy(x, rows * x_bytes);
        own_y_ = copy(y, rows * y_bytes);
        x_ = own_x_.get();
        y_ = own_y_.get();
      }
      int exponent = 0;
      std::frexp(largest, &exponent);
      const int power = std::min(64, 127 - exponent);
      kernels.scale(dtype, at(own_x_.get(), m * x_bytes), columns, std::ldexp(1.0f, -power));
      kernels.scale(dtype, at(own_y_.get(), m * y_bytes), outputs, std::ldexp(1.0f, power));
    }
  }

  const void* x() const { return x_; }
  const void* y() const { return y_; }

 private:
  static Floats copy(const void* from, int64_t bytes) {
    Floats to = floats(ceil_div(bytes, sizeof(float)));
    std::memcpy(to.get(), from, bytes);
    return to;
  }

  const void* x_;
  const void* y_;
  Floats own_x_, own_y_;
};

struct Gradients {
  void* scales;
  void* biases;
};

void add_up(const QuantizedMatrixView& matrix,
            const void* x,
            const void* y,
            int64_t rows,
            const Gradients& out) {
  const QuantizedCpuKernels& kernels = quantized_cpu_kernels();
  const QuantizedScaleGradient& gradient = kernels.scale_gradient;
  const bool has_scales = out.scales != nullptr;
  const int64_t size = element_size(matrix.dtype);
  const int64_t panels = ceil_div(matrix.outputs, kernels.panel);
  const QuantizedScaleGradientSizes most = {matrix, std::min(rows, kPassRows), has_scales};
  const Floats packed = floats(gradient.packed(most));
  // With one pass, sums are of the thread.
  const bool keeps_sums = rows > kPassRows;
  const int64_t sums_step = gradient.sums(most);
  const Floats all_sums = keeps_sums ? floats(panels * sums_step) : nullptr;
  for (int64_t first = 0; first < rows; first += kPassRows) {
    const QuantizedScaleGradientSizes sizes = {matrix, std::min(kPassRows, rows - first),
                                               has_scales};
    const int64_t grain = ceil_div(kGrainElements, 2 * matrix.columns);
    parallel_for(ceil_div(sizes.rows, 2), grain, [&](int64_t begin, int64_t end) {
      gradient.pack(
          {sizes, at(x, first * matrix.columns * size), begin, end - begin, packed.get()});
    });
    const int64_t products = kernels.panel * matrix.columns * sizes.rows;
    parallel_for(panels, ceil_div(kGrainProducts, products), [&](int64_t begin, int64_t end) {
      const Floats scratch = floats(gradient.scratch(sizes));
      const Floats own_sums = keeps_sums ? nullptr : floats(sums_step);
      for (int64_t panel = begin; panel < end; ++panel) {
        const int64_t n = panel * kernels.panel;
        gradient.multiply({sizes, n, std::min<int64_t>(kernels.panel, matrix.outputs - n),
                           at(y, first * matrix.outputs * size), packed.get(),
                           keeps_sums ? all_sums.get() + panel * sums_step : own_sums.get(),
                           scratch.get(), first == 0, first + sizes.rows == rows, out.scales,
                           out.biases});
      }
    });
  }
}

}  // namespace

void quantized_scale_gradient_cpu(const QuantizedScaleGradientArgs& args) {
  const QuantizedSizes& sizes = args.sizes;
  const int64_t groups = sizes.outputs * (sizes.columns / args.format.group);
  const int64_t size = element_size(args.dtype);
  if (sizes.batch * groups == 0) {
    return;
  }
  if (sizes.rows == 0) {
    std::memset(args.d_biases, 0, sizes.batch * groups * size);
    if (args.d_scales) {
      std::memset(args.d_scales, 0, sizes.batch * groups * size);
    }
    return;
  }
  const int64_t words = sizes.outputs * (sizes.columns * args.format.bits / 32);
  for (int64_t batch = 0; batch < sizes.batch; ++batch) {
    const QuantizedMatrixView matrix = {
        args.format, args.dtype, sizes.columns, sizes.outputs, {args.w + batch * words}};
    const BalancedRows balanced(
        args.dtype, at(args.x, batch * sizes.rows * sizes.columns * size), sizes.columns,
        at(args.y, batch * sizes.rows * sizes.outputs * size), sizes.outputs, sizes.rows);
    const auto of_batch = [&](void* all) { return all ? at(all, batch * groups * size) : nullptr; };
    add_up(matrix, balanced.x(), balanced.y(), sizes.rows,
           {of_batch(args.d_scales), of_batch(args.d_biases)});
  }
}

}  // namespace mlx_anvil

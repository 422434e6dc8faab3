// Quantized products of random matrices, against sums in float64.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "common/integers.h"
#include "driver.h"
#include "quantized_matmul/cpu.h"
#include "quantized_matmul/simd/kernels.h"

using namespace mlx_anvil;

namespace {

// ---- matrices -----------------------------------------------------------------------------------

double e4m3(int byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  const double size = exponent == 0 ? mantissa * 0x1p-9 : std::ldexp(8 + mantissa, exponent - 10);
  return byte & 0x80 ? -size : size;
}
double e2m1(int code) {
  constexpr double kValues[] = {0, .5, 1, 1.5, 2, 3, 4, 6};
  return code & 8 ? -kValues[code & 7] : kValues[code & 7];
}

double largest_code(const QuantizedFormat& format) {
  switch (format.kind) {
    case QuantizedKind::kAffine:
      return (1 << format.bits) - 1;
    case QuantizedKind::kMxfp8:
      return 448;
    default:
      return 6;
  }
}

// An element of W.
struct Weight {
  double value;
  double terms;  // |scale * code| + |bias|, which can be much larger than |value|
  double most;   // |scale| times the largest code of the format
};

struct Matrix {
  QuantizedFormat format;
  KernelDtype dtype, scale_dtype;
  int64_t outputs, columns;
  std::vector<uint32_t> w;
  std::vector<char> scales, biases;
  std::vector<Weight> weights;  // [outputs][columns]

  // Scales and biases are of any dtype if x is float32.
  Matrix(QuantizedFormat of, KernelDtype type, int64_t n, int64_t k)
      : format(of),
        dtype(type),
        scale_dtype(type == KernelDtype::kFloat32 ? KernelDtype(random_bits() % 3) : type),
        outputs(n),
        columns(k),
        weights(n * k) {
    for (int64_t i = 0; i < n * k * of.bits / 32; ++i) {
      const auto word = static_cast<uint32_t>(random_bits());
      w.push_back(of.kind == QuantizedKind::kMxfp8 ? word & 0xbfbfbfbfu : word);  // no NaN
    }
    const int64_t groups = n * k / of.group;
    std::vector<float> scale(groups), bias(groups);
    const float unit = 2.0f / static_cast<float>(1 << of.bits);
    for (int64_t g = 0; g < groups; ++g) {
      scale[g] = uniform(-unit, unit);
      bias[g] = uniform(-1.5f, 1.5f);
    }
    if (of.has_biases()) {
      scales = stored(scale_dtype, scale);
      biases = stored(scale_dtype, bias);
    } else {
      for (int64_t g = 0; g < groups; ++g) {
        // Small enough for float16 results, and no NaN.
        scales.push_back(static_cast<char>(
            of.kind == QuantizedKind::kNvfp4 ? random_bits() & 0xbf : 118 + random_bits() % 8));
      }
    }
    for (int64_t i = 0; i < n * k; ++i) {
      weights[i] = weight(i / k, i % k);
    }
  }

  Weight weight(int64_t n, int64_t k) const {
    const int64_t bit = (n * columns + k) * format.bits, group = (n * columns + k) / format.group;
    uint64_t words = w[bit / 32];
    if (bit % 32 + format.bits > 32) {
      words |= static_cast<uint64_t>(w[bit / 32 + 1]) << 32;
    }
    const int code = static_cast<int>(words >> (bit % 32) & ((1u << format.bits) - 1));
    const int byte = static_cast<uint8_t>(scales[format.has_biases() ? 0 : group]);
    const bool affine = format.has_biases(), has_e4m3 = format.kind == QuantizedKind::kNvfp4;
    const double scale = affine     ? loaded(scale_dtype, scales, group)
                         : has_e4m3 ? e4m3(byte)
                                    : std::ldexp(1, byte - 127);
    const double number = affine                                 ? code
                          : format.kind == QuantizedKind::kMxfp8 ? e4m3(code)
                                                                 : e2m1(code);
    const double bias = affine ? loaded(scale_dtype, biases, group) : 0;
    return {scale * number + bias, std::abs(scale * number) + std::abs(bias),
            std::abs(scale) * largest_code(format)};
  }

  std::vector<char> times(QuantizedProduct product,
                          const std::vector<char>& x,
                          int64_t rows) const {
    std::vector<char> out(
        rows * (product == QuantizedProduct::kTransposed ? outputs : columns) * element_size(dtype),
        '\xff');
    QuantizedMatmulArgs args{};
    args.dtype = dtype;
    args.format = format;
    args.product = product;
    args.sizes = {1, rows, columns, outputs};
    args.weights = {w.data(), scales.data(), format.has_biases() ? biases.data() : nullptr,
                    scale_dtype};
    args.x = x.data();
    args.out = out.data();
    quantized_matmul_cpu(args);
    return out;
  }
};

// ---- comparisons --------------------------------------------------------------------------------

std::string name_of(const Matrix& matrix, QuantizedProduct product, int64_t rows) {
  constexpr const char* kKinds[] = {"affine", "mxfp4", "mxfp8", "nvfp4"};
  constexpr const char* kDtypes[] = {"float32", "float16", "bfloat16"};
  char text[200];
  std::snprintf(
      text, sizeof(text), "%s %d bits groups of %d %s, scales %s, %d bits of x, %s, %d x (%d, %d)",
      kKinds[static_cast<int>(matrix.format.kind)], matrix.format.bits, matrix.format.group,
      kDtypes[static_cast<int>(matrix.dtype)], kDtypes[static_cast<int>(matrix.scale_dtype)],
      matrix.format.activation_bits, product == QuantizedProduct::kTransposed ? "x W^T" : "x W",
      static_cast<int>(rows), static_cast<int>(matrix.outputs), static_cast<int>(matrix.columns));
  return text;
}

// Each row has a magnitude of its own, and some columns are larger than the others.
std::vector<float> random_rows(int64_t rows, int64_t columns) {
  std::vector<float> x(rows * columns);
  for (int64_t m = 0; m < rows; ++m) {
    const float size = std::exp2(uniform(-6, 6));
    for (int64_t k = 0; k < columns; ++k) {
      x[m * columns + k] = size * uniform(-1, 1) * (random_bits() % 64 == 0 ? 8.0f : 1.0f);
    }
  }
  return x;
}

void compare(const Matrix& matrix, QuantizedProduct product, int64_t rows) {
  const bool transposed = product == QuantizedProduct::kTransposed;
  const int64_t summed = transposed ? matrix.columns : matrix.outputs;
  const int64_t columns = transposed ? matrix.outputs : matrix.columns;
  const std::string name = name_of(matrix, product, rows);
  std::vector<char> x = stored(matrix.dtype, random_rows(rows, summed));
  const std::vector<char> out = matrix.times(product, x, rows);
  const bool wide = matrix.dtype == KernelDtype::kFloat32;
  const int bits = matrix.format.activation_bits;
  // Bits of an element of x, next to the largest of its group.
  const double rounding = transposed && bits == 8               ? 0x1p-8
                          : wide && !(transposed && bits == 16) ? 0x1p-23
                                                                : 0x1p-15;
  const double of_out = wide ? 0 : matrix.dtype == KernelDtype::kFloat16 ? 0x1p-11 : 0x1p-8;
  double worst = 0;
  for (int64_t m = 0; m < rows; ++m) {
    double largest = 0;
    for (int64_t k = 0; k < summed; ++k) {
      largest = std::max(largest, std::abs(loaded(matrix.dtype, x, m * summed + k)));
    }
    for (int64_t n = 0; n < columns; ++n) {
      double sum = 0, sizes = 0, squares = 0, most = 0;
      for (int64_t k = 0; k < summed; ++k) {
        const Weight& w = matrix.weights[transposed ? n * summed + k : k * columns + n];
        const double of_x = loaded(matrix.dtype, x, m * summed + k);
        sum += of_x * w.value;
        sizes += std::abs(of_x) * w.terms;
        squares += w.value * w.value;
        most = std::max(most, w.most);
      }
      if (!transposed) {  // x times scales is rounded next to the largest scale, then times codes
        squares = 4 * static_cast<double>(summed) * most * most;
      }
      // Rounding x is random: the error is that of the root of a sum of squares, five times.
      const double allowed = 5 * rounding * largest * std::sqrt(squares) + 3e-7 * sizes +
                             1.01 * of_out * std::abs(sum) + 1e-7;
      const double error = std::abs(loaded(matrix.dtype, out, m * columns + n) - sum);
      worst = std::max(worst, error / allowed);
      if (std::isnan(error)) {
        worst = INFINITY;
      }
    }
  }
  char text[40];
  std::snprintf(text, sizeof(text), ": %.3g of the allowed error", worst);
  check(worst <= 1, name + text);
  if (std::getenv("VERBOSE")) {
    std::printf("%s%s\n", name.c_str(), text);
  }

  // A row's bits, alone and among others.
  const int64_t size = element_size(matrix.dtype), m = random_bits() % rows;
  const auto row_of = [&](const std::vector<char>& all, int64_t count) {
    return std::vector<char>(all.begin() + m * count * size, all.begin() + (m + 1) * count * size);
  };
  if (transposed && current_isa() != Isa::kBaseline &&
      matrix.format.kind != QuantizedKind::kMxfp8) {
    const std::vector<char> alone = matrix.times(product, row_of(x, summed), 1);
    check(alone == row_of(out, columns), name + ": other bits for a row alone");
  }
  // NaN in one row stays there. A plain product of few rows may then take other steps for all.
  const bool same_bits = transposed || rows > kQuantizedGemvRows;
  if (rows > 1) {
    for (int64_t b = 0; b < size; ++b) {
      x[m * summed * size + b] = '\xff';
    }
    const std::vector<char> with_nan = matrix.times(product, x, rows);
    bool same = true;
    for (int64_t i = 0; i < rows * columns; ++i) {
      const double number = loaded(matrix.dtype, with_nan, i);
      const bool as_before = std::memcmp(&with_nan[i * size], &out[i * size], size) == 0;
      same &= i / columns == m ? std::isnan(number) : same_bits ? as_before : !std::isnan(number);
    }
    check(same, name + ": NaN in a row changes other rows, or not its own");
  }
}

}  // namespace

void check_products() {
  constexpr int64_t kRows[] = {1, 2, 3, 5, 8, 9, 14};
  int turn = static_cast<int>(random_bits() % 64);
  const auto compare_format = [&](QuantizedKind kind, int bits, int group) {
    for (KernelDtype dtype :
         {KernelDtype::kFloat32, KernelDtype::kFloat16, KernelDtype::kBfloat16}) {
      for (int activation_bits : {0, 8, 16}) {
        for (int64_t rows : {int64_t{1}, kRows[1 + ++turn % 4], kRows[5 + turn % 2]}) {
          // Columns of whole and partial chunks; rows of w that fill no strip.
          const int64_t columns = group * (1 + static_cast<int64_t>(random_bits() % (640 / group)));
          const int64_t outputs = 1 + static_cast<int64_t>(random_bits() % 45);
          compare(Matrix({kind, bits, group, activation_bits}, dtype, outputs, columns),
                  QuantizedProduct::kTransposed, rows);
        }
      }
      const int64_t columns = group * (1 + static_cast<int64_t>(random_bits() % (384 / group)));
      const int64_t outputs = 1 + static_cast<int64_t>(random_bits() % 300);
      for (int64_t rows : {int64_t{1}, kRows[1 + ++turn % 4], kRows[5 + turn % 2]}) {
        compare(Matrix({kind, bits, group}, dtype, outputs, columns), QuantizedProduct::kPlain,
                rows);
      }
    }
  };
  for (int bits : {2, 3, 4, 5, 6, 8}) {
    for (int group : {32, 64, 128}) {
      compare_format(QuantizedKind::kAffine, bits, group);
    }
  }
  compare_format(QuantizedKind::kMxfp4, 4, 32);
  compare_format(QuantizedKind::kMxfp8, 8, 32);
  compare_format(QuantizedKind::kNvfp4, 4, 16);
}

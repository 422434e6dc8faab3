#include "quantized_matmul/checks.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "common/checks.h"
#include "common/errors.h"

namespace mlx_anvil {

namespace {

// ---- the format ---------------------------------------------------------------------------------

struct Mode {
  QuantizedKind kind;
  std::vector<int> bits;  // the first entry of each list is the default
  std::vector<int> groups;
};

const Mode kModes[] = {
    {QuantizedKind::kAffine, {4, 2, 3, 5, 6, 8}, {64, 32, 128}},
    {QuantizedKind::kMxfp4, {4}, {32}},
    {QuantizedKind::kMxfp8, {8}, {32}},
    {QuantizedKind::kNvfp4, {4}, {16}},
};

std::string to_list(std::vector<int> numbers) {
  std::sort(numbers.begin(), numbers.end());
  std::string text;
  for (int n : numbers) {
    text += (text.empty() ? "" : ", ") + std::to_string(n);
  }
  return text;
}

int choose(const char* op,
           const char* argument,
           const std::optional<int>& given,
           const std::vector<int>& allowed,
           const std::string& mode) {
  const int value = given.value_or(allowed[0]);
  if (std::find(allowed.begin(), allowed.end(), value) == allowed.end()) {
    throw_value_error(op, std::string(argument) + " is " + std::to_string(value) +
                              "; allowed in mode '" + mode + "': " + to_list(allowed) + ".");
  }
  return value;
}

// ---- arrays -------------------------------------------------------------------------------------

// True if all axes but the last agree.
bool same_leading(const mx::array& a, const mx::array& b) {
  return a.ndim() == b.ndim() &&
         std::equal(a.shape().begin(), a.shape().end() - 1, b.shape().begin());
}

// Name of an array of the matrix. The string is built only for error messages.
struct MatrixArray {
  const char* prefix;
  const char* name;

  std::string text() const { return std::string(prefix) + name; }
};

void require_dtype(const char* op, MatrixArray array, const mx::array& x, mx::Dtype dtype) {
  if (x.dtype() != dtype) {
    throw_value_error(op, array.text() + " has dtype " + to_text(x.dtype()) +
                              "; allowed: " + to_text(dtype) + ".");
  }
}

void require_kernel_dtype(const char* op, MatrixArray array, const mx::array& x) {
  if (!is_kernel_dtype(x.dtype())) {
    require_kernel_dtypes(op, {{array.text().c_str(), x}});
  }
}

}  // namespace

std::string describe(const std::string& name, const mx::array& x) {
  return name + " has shape " + to_text(x.shape());
}

QuantizedFormat checked_format(const char* op, const QuantizedOptions& options) {
  for (const Mode& mode : kModes) {
    if (options.mode == mode_name(mode.kind)) {
      return {mode.kind, choose(op, "bits", options.bits, mode.bits, options.mode),
              choose(op, "group_size", options.group_size, mode.groups, options.mode)};
    }
  }
  throw_value_error(
      op, "mode is '" + options.mode + "'; allowed: 'affine', 'mxfp4', 'mxfp8', 'nvfp4'.");
}

void check_matrix(const char* op,
                  const char* prefix,
                  const QuantizedFormat& format,
                  const QuantizedMatrix& matrix) {
  const MatrixArray w{prefix, "w"}, scales{prefix, "scales"}, biases{prefix, "biases"};
  const std::string mode = mode_name(format.kind);
  require_dtype(op, w, matrix.w, mx::uint32);
  if (format.has_biases() && !matrix.biases) {
    throw_value_error(op, biases.text() + " is None; mode '" + mode + "' needs an array.");
  }
  if (!format.has_biases() && matrix.biases) {
    throw_value_error(op, biases.text() + " is an array; mode '" + mode + "' allows None only.");
  }
  if (format.has_biases()) {
    require_kernel_dtype(op, scales, matrix.scales);
    require_kernel_dtype(op, biases, *matrix.biases);
  } else {
    require_dtype(op, scales, matrix.scales, mx::uint8);
  }
  if (matrix.w.ndim() < 2) {
    throw_value_error(
        op, describe(w.text(), matrix.w) + "; allowed: rank 2 or more, [..., N, packed K].");
  }
  const int64_t packed_bits = int64_t{32} * matrix.w.shape(-1);
  const bool scales_fit =
      same_leading(matrix.w, matrix.scales) &&
      packed_bits == int64_t{matrix.scales.shape(-1)} * format.group * format.bits;
  if (!scales_fit) {
    throw_value_error(op, describe(w.text(), matrix.w) + " and " +
                              describe(scales.text(), matrix.scales) + "; allowed with bits " +
                              std::to_string(format.bits) + " and group_size " +
                              std::to_string(format.group) +
                              ": scales [..., N, G] with w [..., N, G * group_size * bits / 32].");
  }
  if (matrix.biases && matrix.biases->shape() != matrix.scales.shape()) {
    throw_value_error(op, describe(biases.text(), *matrix.biases) + " and " +
                              describe(scales.text(), matrix.scales) + "; allowed: equal shapes.");
  }
}

void check_x(const char* op,
             const mx::array& x,
             const char* w_name,
             const QuantizedMatrix& matrix,
             int64_t wanted) {
  if (x.ndim() == 0 || x.shape(-1) != wanted) {
    throw_value_error(op, describe("x", x) + " and " + describe(w_name, matrix.w) +
                              "; allowed: x [..., " + std::to_string(wanted) + "].");
  }
}

int64_t columns_of(const QuantizedFormat& format, const QuantizedMatrix& matrix) {
  return int64_t{matrix.scales.shape(-1)} * format.group;
}

mx::Dtype result_dtype(const mx::array& x, std::initializer_list<const QuantizedMatrix*> matrices) {
  mx::Dtype dtype = x.dtype();
  for (const QuantizedMatrix* matrix : matrices) {
    if (matrix->biases) {
      dtype = mx::promote_types(dtype,
                                mx::promote_types(matrix->scales.dtype(), matrix->biases->dtype()));
    }
  }
  return dtype;
}

void convert(QuantizedMatrix& matrix, mx::Dtype dtype, mx::Stream s) {
  if (!matrix.biases) {
    return;
  }
  for (mx::array* x : {&matrix.scales, &*matrix.biases}) {
    if (x->dtype() != dtype) {
      *x = mx::astype(*x, dtype, s);
    }
  }
}

}  // namespace mlx_anvil

#include "quantized_matmul/checks.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "common/checks.h"
#include "common/errors.h"
#include "common/simulate.h"

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
           const std::string& argument,
           const std::optional<int>& given,
           const std::vector<int>& allowed,
           const std::string& mode) {
  const int value = given.value_or(allowed[0]);
  if (std::find(allowed.begin(), allowed.end(), value) == allowed.end()) {
    throw_value_error(op, argument + " is " + std::to_string(value) + "; allowed in mode '" + mode +
                              "': " + to_list(allowed) + ".");
  }
  return value;
}

// Returns 0 for none.
int checked_activation_bits(const char* op, const std::optional<int>& given) {
  if (given && *given != 8 && *given != 16) {
    throw_value_error(op,
                      "activation_bits is " + std::to_string(*given) + "; allowed: None, 8, 16.");
  }
  return given.value_or(0);
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

// ---- the formats that arrays fit ----------------------------------------------------------------

bool fits(const QuantizedFormat& format, const QuantizedMatrix& matrix) {
  const auto& [w, scales, biases] = matrix;
  const bool has_dtypes =
      w.dtype() == mx::uint32 && format.has_biases() == biases.has_value() &&
      (biases ? is_kernel_dtype(scales.dtype()) && is_kernel_dtype(biases->dtype())
              : scales.dtype() == mx::uint8);
  return has_dtypes && w.ndim() >= 2 && same_leading(w, scales) &&
         int64_t{32} * w.shape(-1) == int64_t{scales.shape(-1)} * format.group * format.bits &&
         (!biases || biases->shape() == scales.shape());
}

// How a caller selects the formats that the matrix fits: "bits=4, group_size=64 or bits=8, ...".
// `columns` is the number of codes per row, if it is known. `affine` precedes affine formats.
std::string fitting_options(const QuantizedMatrix& matrix,
                            std::optional<int64_t> columns,
                            const char* affine = "") {
  std::string text;
  for (const Mode& mode : kModes) {
    for (int bits : mode.bits) {
      for (int group : mode.groups) {
        const QuantizedFormat format = {mode.kind, bits, group};
        if (!fits(format, matrix) || (columns && columns_of(format, matrix) != *columns)) {
          continue;
        }
        text += text.empty() ? "" : " or ";
        text += mode.kind == QuantizedKind::kAffine
                    ? affine + std::string("bits=") + std::to_string(bits) +
                          ", group_size=" + std::to_string(group)
                    : "mode='" + std::string(mode_name(mode.kind)) + "'";
      }
    }
  }
  return text;
}

// Throws for a matrix that does not fit the format of a call. The text ends with those that it
// fits.
struct Misfit {
  const char* op;
  const char* prefix;
  const QuantizedFormat& format;
  const QuantizedMatrix& matrix;
  std::optional<int64_t> columns;

  [[noreturn]] void raise(const std::string& text) const {
    const char* const affine = format.has_biases() ? "" : "mode='affine', ";
    std::string others = fitting_options(matrix, columns, affine);
    if (others.empty() && columns) {
      others = fitting_options(matrix, std::nullopt, affine);
    }
    const std::string hint =
        others.empty() ? "" : " These " + (prefix + ("arrays fit " + others)) + ".";
    throw_value_error(op, text + hint);
  }
};

void require_dtype(const Misfit& misfit, MatrixArray array, const mx::array& x, mx::Dtype dtype) {
  if (x.dtype() != dtype) {
    misfit.raise(array.text() + " has dtype " + to_text(x.dtype()) +
                 "; allowed: " + to_text(dtype) + ".");
  }
}

void require_kernel_dtype(const Misfit& misfit, MatrixArray array, const mx::array& x) {
  if (!is_kernel_dtype(x.dtype())) {
    misfit.raise(array.text() + " has dtype " + to_text(x.dtype()) +
                 "; allowed: float32, float16, bfloat16.");
  }
}

// The width that w would have for these scales, as text.
std::string wanted_w(const QuantizedFormat& format, const mx::array& scales) {
  if (scales.ndim() < 2) {
    return "scales [..., N, K / group_size]";
  }
  mx::Shape shape = scales.shape();
  const int64_t width = int64_t{shape.back()} * format.group * format.bits / 32;
  shape.pop_back();
  std::string text = "w (";
  for (int extent : shape) {
    text += std::to_string(extent) + ", ";
  }
  return text + std::to_string(width) + ") with these scales";
}

}  // namespace

QuantizedFormat checked_format(const char* op,
                               const QuantizedOptions& options,
                               const char* prefix) {
  const std::string name = prefix;
  const int activation_bits = checked_activation_bits(op, options.activation_bits);
  for (const Mode& mode : kModes) {
    if (options.mode == mode_name(mode.kind)) {
      return {mode.kind, choose(op, name + "bits", options.bits, mode.bits, options.mode),
              choose(op, name + "group_size", options.group_size, mode.groups, options.mode),
              activation_bits};
    }
  }
  throw_value_error(
      op, name + "mode is '" + options.mode + "'; allowed: 'affine', 'mxfp4', 'mxfp8', 'nvfp4'.");
}

void check_matrix(const char* op,
                  const char* prefix,
                  const QuantizedFormat& format,
                  const QuantizedMatrix& matrix,
                  std::optional<int64_t> columns) {
  if (fits(format, matrix)) {
    return;
  }
  const Misfit misfit{op, prefix, format, matrix, columns};
  const MatrixArray w{prefix, "w"}, scales{prefix, "scales"}, biases{prefix, "biases"};
  const std::string mode = mode_name(format.kind);
  require_dtype(misfit, w, matrix.w, mx::uint32);
  if (format.has_biases() && !matrix.biases) {
    misfit.raise(biases.text() + " is None; mode '" + mode + "' needs an array.");
  }
  if (!format.has_biases() && matrix.biases) {
    misfit.raise(biases.text() + " is an array; mode '" + mode + "' allows None only.");
  }
  if (format.has_biases()) {
    require_kernel_dtype(misfit, scales, matrix.scales);
    require_kernel_dtype(misfit, biases, *matrix.biases);
  } else {
    require_dtype(misfit, scales, matrix.scales, mx::uint8);
  }
  if (matrix.w.ndim() < 2) {
    misfit.raise(shape_text(w.text(), matrix.w) + "; allowed: rank 2 or more, [..., N, packed K].");
  }
  if (matrix.biases && matrix.biases->shape() != matrix.scales.shape()) {
    misfit.raise(shape_text(biases.text(), *matrix.biases) + " and " +
                 shape_text(scales.text(), matrix.scales) + "; allowed: equal shapes.");
  }
  misfit.raise(shape_text(w.text(), matrix.w) + " and " + shape_text(scales.text(), matrix.scales) +
               "; allowed with bits " + std::to_string(format.bits) + " and group_size " +
               std::to_string(format.group) + ": " + wanted_w(format, matrix.scales) + ".");
}

void check_x(const char* op,
             const mx::array& x,
             const char* w_name,
             const QuantizedMatrix& matrix,
             int64_t wanted,
             bool over_columns) {
  if (x.ndim() > 0 && x.shape(-1) == wanted) {
    return;
  }
  std::string hint;
  if (over_columns && x.ndim() > 0) {
    const std::string others = fitting_options(matrix, x.shape(-1));
    hint = others.empty() ? "" : " With this x, these arrays fit " + others + ".";
  }
  throw_value_error(op, shape_text("x", x) + " and " + shape_text(w_name, matrix.w) +
                            "; allowed: x [..., " + std::to_string(wanted) + "]." + hint);
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

void convert_for_product(QuantizedMatrix& matrix, mx::Dtype dtype, mx::Stream s) {
  const bool are_read_as_given = dtype == mx::float32 && !for_gpu(s) && matrix.biases &&
                                 matrix.scales.dtype() == matrix.biases->dtype();
  if (!are_read_as_given) {
    convert(matrix, dtype, s);
  }
}

}  // namespace mlx_anvil

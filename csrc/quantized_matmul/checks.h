// Checks of quantized matrices, shared by the ops that take one (see common/checks.h).
#pragma once

#include <initializer_list>
#include <optional>
#include <string>

#include "quantized_matmul/compose.h"

namespace mlx_anvil {

struct QuantizedOptions {
  std::optional<int> group_size;  // default depends on the mode
  std::optional<int> bits;        // likewise
  std::string mode = "affine";
  std::optional<int> activation_bits = std::nullopt;  // of x W^T on the CPU; none: of the dtype
};

// `prefix` precedes the names of the options in errors, such as "down_".
QuantizedFormat checked_format(const char* op,
                               const QuantizedOptions& options,
                               const char* prefix = "");

// `prefix` precedes array names in errors, such as "gate " in swiglu. An error names the formats
// that the arrays fit; `columns` is the number of codes per row that x implies, if any.
void check_matrix(const char* op,
                  const char* prefix,
                  const QuantizedFormat& format,
                  const QuantizedMatrix& matrix,
                  std::optional<int64_t> columns = std::nullopt);

// Returns the last axis of x, for check_matrix().
inline std::optional<int64_t> columns_of(const mx::array& x) {
  return x.ndim() > 0 ? std::optional<int64_t>(x.shape(-1)) : std::nullopt;
}

// Returns K, the codes per row of w.
int64_t columns_of(const QuantizedFormat& format, const QuantizedMatrix& matrix);

// Checks that the last axis of x has `wanted` elements: the columns of the matrix, or its rows.
void check_x(const char* op,
             const mx::array& x,
             const char* w_name,
             const QuantizedMatrix& matrix,
             int64_t wanted,
             bool over_columns = true);

// Returns the promoted dtype of x and of affine scales and biases.
mx::Dtype result_dtype(const mx::array& x, std::initializer_list<const QuantizedMatrix*> matrices);

// Converts affine scales and biases to `dtype`.
void convert(QuantizedMatrix& matrix, mx::Dtype dtype, mx::Stream s);

// The same for a product with x of `dtype`, whose kernels on the CPU read float16 and bfloat16 as
// they are where x is float32.
void convert_for_product(QuantizedMatrix& matrix, mx::Dtype dtype, mx::Stream s);

}  // namespace mlx_anvil

// Checks of quantized matrices, shared by the ops that take one (see common/checks.h).
#pragma once

#include <optional>
#include <string>

#include "quantized_matmul/compose.h"

namespace mlx_anvil {

struct QuantizedOptions {
  std::optional<int> group_size;  // default: that of the mode
  std::optional<int> bits;        // likewise
  std::string mode = "affine";
};

QuantizedFormat checked_format(const char* op, const QuantizedOptions& options);

// `prefix` comes before the names of the arrays: "gate " for those of a pair.
void check_matrix(const char* op,
                  const std::string& prefix,
                  const QuantizedFormat& format,
                  const QuantizedMatrix& matrix);

// K: codes in a row of w.
int64_t columns_of(const QuantizedFormat& format, const QuantizedMatrix& matrix);

// "w has shape (2, 3)"
std::string describe(const std::string& name, const mx::array& x);

}  // namespace mlx_anvil

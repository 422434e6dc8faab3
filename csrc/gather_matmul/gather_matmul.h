// Ops on gathered matrices: gather_quantized_matmul, gather_matmul.
#pragma once

#include "quantized_matmul/checks.h"

namespace mlx_anvil {

inline constexpr const char* kGatherQuantizedMatmul = "gather_quantized_matmul";
inline constexpr const char* kGatherMatmul = "gather_matmul";

mx::array gather_quantized_matmul(const mx::array& x,
                                  QuantizedMatrix matrix,
                                  const std::optional<mx::array>& lhs_indices,
                                  const std::optional<mx::array>& rhs_indices,
                                  bool transpose,
                                  const QuantizedOptions& options,
                                  bool sorted_indices,
                                  mx::StreamOrDevice stream);

mx::array gather_matmul(const mx::array& a,
                        const mx::array& b,
                        const std::optional<mx::array>& lhs_indices,
                        const std::optional<mx::array>& rhs_indices,
                        bool sorted_indices,
                        mx::StreamOrDevice stream);

}  // namespace mlx_anvil

// Primitives of quantized products. Both take x of any rank with w of rank 2, or x and w with equal
// leading dimensions. Scales and biases have the leading dimensions of w.
#pragma once

#include "quantized_matmul/compose.h"

namespace mlx_anvil {

// Applies our kernels, or MLX's op if no kernel supports the call (`trace()` then shows it under
// `op`). x, scales and biases share one dtype, except uint8 scales and what convert_for_product()
// leaves as it is.
mx::array apply_quantized_matmul(const char* op,
                                 const QuantizedFormat& format,
                                 QuantizedProduct product,
                                 mx::array x,
                                 QuantizedMatrix matrix,
                                 mx::Stream s);

// The products kTransposed of x with several matrices of rank 2 that have one format and as many
// columns. On the CPU, up to kQuantizedGemvRows rows are one node; otherwise each product is one.
// If x is the pending result of mx::reshape, that node is skipped.
Arrays apply_quantized_products(const QuantizedFormat& format,
                                const mx::array& x,
                                std::vector<QuantizedMatrix> matrices,
                                mx::Stream s);

mx::array apply_quantized_swiglu(const QuantizedFormat& format,
                                 mx::array x,
                                 QuantizedMatrix gate,
                                 QuantizedMatrix up,
                                 const GateOptions& activation,
                                 mx::Stream s);

// Returns the sizes of a call with w [..., N, packed columns], of any format. If w is shared,
// `rows` counts all rows of x.
QuantizedSizes sizes_with_columns(int64_t columns, const mx::array& x, const mx::array& w);

QuantizedSizes quantized_sizes(const QuantizedFormat& format,
                               const mx::array& x,
                               const mx::array& w);

}  // namespace mlx_anvil

// Gradients in scales and biases as a primitive of CPU streams.
#pragma once

#include "quantized_matmul/compose.h"

namespace mlx_anvil {

// Returns the gradients in scales and biases, or in biases alone, of an affine matrix w:
//   G = y^T x;  d_scales = sums over groups of G * codes;  d_biases = sums over groups of G
// y [..., rows, N] and x [..., rows, K] are a cotangent and the other operand of a product. They
// have any rank with w of rank 2, or the leading dimensions of w.
Arrays apply_scale_gradient(const char* op,
                            const QuantizedFormat& format,
                            mx::array y,
                            mx::array x,
                            mx::array w,
                            bool has_scales,
                            mx::Stream s);

// The matrix whose products are the gradients of these two: w with their cotangents as scales and
// biases. Without has_scales, the scales are zero.
QuantizedMatrix matrix_of_cotangents(const mx::array& w,
                                     const Arrays& cotangents,
                                     bool has_scales,
                                     mx::Stream s);

// Adds `terms` to `sums`, which are empty at first.
void add_terms(Arrays& sums, const Arrays& terms, mx::Stream s);

}  // namespace mlx_anvil

// Quantized products as graphs of MLX ops. The composed definition computes in float32 whatever the
// dtype, and provides the derivatives that have no kernel. MLX's own op serves calls without a
// kernel.
#pragma once

#include "common/primitive.h"
#include "quantized_matmul/problem.h"

namespace mlx_anvil {

// Returns MLX's name of a format.
const char* mode_name(QuantizedKind kind);

// One quantized matrix. `biases` is set for affine formats.
struct QuantizedMatrix {
  mx::array w, scales;
  std::optional<mx::array> biases;
};

// One matrix among the inputs of a primitive, row-contiguous. `biases` is null unless affine.
struct QuantizedWeightArrays {
  const mx::array* w = nullptr;
  const mx::array* scales = nullptr;
  const mx::array* biases = nullptr;
};

// Dequantises the whole matrix to float32. Differentiable in scales and biases, to any order.
mx::array compose_dequantized(const QuantizedFormat& format,
                              const QuantizedMatrix& matrix,
                              mx::Stream s);

// Multiplies x [..., rows, *] by w [N, *], or by [..., N, *] with the batch of x. Differentiable in
// x, scales and biases, to any order.
mx::array compose_quantized_matmul(const QuantizedFormat& format,
                                   QuantizedProduct product,
                                   const mx::array& x,
                                   const QuantizedMatrix& matrix,
                                   mx::Stream s);

// The gradients in scales and biases (affine), [..., N, groups], given that in the dequantised
// weights, [..., N, K], float32. Differentiable to any order.
mx::array compose_scale_gradient(const QuantizedFormat& format,
                                 const mx::array& of_weights,
                                 const mx::array& w,
                                 mx::Stream s);
mx::array compose_bias_gradient(const QuantizedFormat& format,
                                const mx::array& of_weights,
                                mx::Stream s);

mx::array mlx_quantized_matmul(const QuantizedFormat& format,
                               QuantizedProduct product,
                               const mx::array& x,
                               const QuantizedMatrix& matrix,
                               mx::Stream s);

}  // namespace mlx_anvil

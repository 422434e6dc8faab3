// Quantized products as graphs of MLX ops, in float32 whatever the inputs' dtype: the definition
// that the derivatives without a kernel come from; and MLX's own ops, for where no kernel serves.
#pragma once

#include "common/primitive.h"
#include "quantized_matmul/problem.h"

namespace mlx_anvil {

// The name that MLX gives to a format.
const char* mode_name(QuantizedKind kind);

// One quantized matrix; `biases` where the format has them.
struct QuantizedMatrix {
  mx::array w, scales;
  std::optional<mx::array> biases;
};

// The arrays of one matrix among the inputs of a primitive, row-contiguous; `biases` is null for
// all but affine.
struct QuantizedWeightArrays {
  const mx::array* w = nullptr;
  const mx::array* scales = nullptr;
  const mx::array* biases = nullptr;
};

// The matrix in full, in float32. Differentiable in scales and biases, to any order.
mx::array compose_dequantized(const QuantizedFormat& format,
                              const QuantizedMatrix& matrix,
                              mx::Stream s);

// x [..., rows, *] against w [N, *] or [..., N, *] with the batch of x. Differentiable in x, scales
// and biases, to any order.
mx::array compose_quantized_matmul(const QuantizedFormat& format,
                                   QuantizedProduct product,
                                   const mx::array& x,
                                   const QuantizedMatrix& matrix,
                                   mx::Stream s);

mx::array mlx_quantized_matmul(const QuantizedFormat& format,
                               QuantizedProduct product,
                               const mx::array& x,
                               const QuantizedMatrix& matrix,
                               mx::Stream s);

// silu(gate) * up of float32 arrays
mx::array compose_swiglu(const mx::array& gate, const mx::array& up, mx::Stream s);

}  // namespace mlx_anvil

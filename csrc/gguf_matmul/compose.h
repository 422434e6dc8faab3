// Products with matrices in GGUF's blocks as graphs of MLX ops, in float32 whatever the dtype: the
// definition, the derivatives that have no kernel, and the route without kernels.
#pragma once

#include "common/primitive.h"
#include "gguf_matmul/problem.h"

namespace mlx_anvil {

// Dequantises w [..., bytes of a row] to float32 [..., K].
mx::array compose_gguf_dequantized(GgufKind kind, const mx::array& w, mx::Stream s);

// Multiplies x [..., rows, *] by w [N, *], or by [..., N, *] with the batch of x.
mx::array compose_gguf_matmul(
    GgufKind kind, QuantizedProduct product, const mx::array& x, const mx::array& w, mx::Stream s);

}  // namespace mlx_anvil

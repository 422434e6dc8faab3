// Quantized products by MLX's own kernel, on Apple's GPUs where that is faster.
#pragma once

#include <optional>

#include "common/evaluate.h"
#include "quantized_matmul/problem.h"

namespace mlx_anvil {

// Returns MLX's kernel if it takes the product and is faster than ours.
std::optional<MlxKernel> faster_mlx_product(const QuantizedFormat& format,
                                            const QuantizedSizes& sizes,
                                            QuantizedProduct product,
                                            const mx::array& x,
                                            mx::Stream stream);

// True if two such products by MLX's kernel and a gate are faster than the fused kernel.
bool mlx_gated_products_are_faster(const QuantizedFormat& format,
                                   const QuantizedSizes& sizes,
                                   const mx::array& x,
                                   mx::Stream stream);

}  // namespace mlx_anvil

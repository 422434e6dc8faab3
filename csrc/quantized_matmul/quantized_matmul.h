// Ops on quantized matrices: quantized_matmul, quantized_gemv, quantized_swiglu.
#pragma once

#include "quantized_matmul/checks.h"

namespace mlx_anvil {

mx::array quantized_matmul(const mx::array& x,
                           QuantizedMatrix matrix,
                           bool transpose,
                           const QuantizedOptions& options,
                           mx::StreamOrDevice stream);

mx::array quantized_gemv(const mx::array& x,
                         QuantizedMatrix matrix,
                         const QuantizedOptions& options,
                         mx::StreamOrDevice stream);

mx::array quantized_swiglu(const mx::array& x,
                           QuantizedMatrix gate,
                           QuantizedMatrix up,
                           const GateOptions& activation,
                           const QuantizedOptions& options,
                           mx::StreamOrDevice stream);

}  // namespace mlx_anvil

// Activations and their derivatives in MLX ops, of float32 arrays.
#pragma once

#include "mlx/mlx.h"

namespace mlx_anvil {

namespace mx = mlx::core;

mx::array silu(const mx::array& x, mx::Stream s);
mx::array silu_derivative(const mx::array& x, mx::Stream s);

// sigmoid(x) (1 - sigmoid(x)), the derivative of mx::sigmoid.
mx::array sigmoid_derivative(const mx::array& x, mx::Stream s);

// x sigmoid(slope x), and its derivative.
mx::array sloped_silu(const mx::array& x, float slope, mx::Stream s);
mx::array sloped_silu_derivative(const mx::array& x, float slope, mx::Stream s);

// x (1 + erf(x / sqrt(2))) / 2
mx::array gelu(const mx::array& x, mx::Stream s);
mx::array gelu_derivative(const mx::array& x, mx::Stream s);

// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
mx::array gelu_tanh(const mx::array& x, mx::Stream s);
mx::array gelu_tanh_derivative(const mx::array& x, mx::Stream s);

// max(x, 0)^2
mx::array relu2(const mx::array& x, mx::Stream s);
mx::array relu2_derivative(const mx::array& x, mx::Stream s);

}  // namespace mlx_anvil

// Numbers of the activations, shared by the host (C++) and the kernels (MSL).
#pragma once

#define MLX_ANVIL_SILU 0
#define MLX_ANVIL_GELU 1
#define MLX_ANVIL_GELU_TANH 2
#define MLX_ANVIL_RELU2 3
#define MLX_ANVIL_SWIGLU_OAI 4

// All kernels of a gate. Include it below the line `// ---- kernels` (metal/common/kernel.h).
#pragma once

#define MLX_ANVIL_GATE_KERNEL(direction, gate, Activation, layout, flat, dtype, T) \
  MLX_ANVIL_KERNEL(#gate "_" #direction "_" #dtype "_" #layout,                    \
                   gated_##direction<T, flat, Activation>)

#define MLX_ANVIL_GATE_DTYPES(direction, gate, Activation, layout, flat)           \
  MLX_ANVIL_GATE_KERNEL(direction, gate, Activation, layout, flat, float32, float) \
  MLX_ANVIL_GATE_KERNEL(direction, gate, Activation, layout, flat, float16, half)  \
  MLX_ANVIL_GATE_KERNEL(direction, gate, Activation, layout, flat, bfloat16, bfloat)

#define MLX_ANVIL_GATE_KERNELS(gate, Activation)                    \
  MLX_ANVIL_GATE_DTYPES(forward, gate, Activation, flat, true)      \
  MLX_ANVIL_GATE_DTYPES(forward, gate, Activation, strided, false)  \
  MLX_ANVIL_GATE_DTYPES(backward, gate, Activation, flat, true)     \
  MLX_ANVIL_GATE_DTYPES(backward, gate, Activation, strided, false) \
  MLX_ANVIL_GATE_DTYPES(jvp, gate, Activation, flat, true)          \
  MLX_ANVIL_GATE_DTYPES(jvp, gate, Activation, strided, false)

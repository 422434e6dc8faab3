// Formats that the GGUF kernels are instantiated for, by their names in kernel names: X(name,
// format).
#pragma once

#define MLX_ANVIL_GGUF_FORMATS(X, ...)          \
  X(q4_0, GgufFormat<GgufQ4_0>, __VA_ARGS__)    \
  X(q8_0, GgufFormat<GgufQ8_0>, __VA_ARGS__)    \
  X(q4_k, GgufFormat<GgufQ4K>, __VA_ARGS__)     \
  X(q5_k, GgufFormat<GgufQ5K>, __VA_ARGS__)     \
  X(q6_k, GgufFormat<GgufQ6K>, __VA_ARGS__)     \
  X(iq4_nl, GgufFormat<GgufIq4Nl>, __VA_ARGS__) \
  X(iq4_xs, GgufFormat<GgufIq4Xs>, __VA_ARGS__)

// Formats that the GGUF kernels are instantiated for, by their names in kernel names, which have no
// underscore: X(name, format).
#pragma once

#define MLX_ANVIL_GGUF_FORMATS(X, ...)         \
  X(q40, GgufFormat<GgufQ4_0>, __VA_ARGS__)    \
  X(q80, GgufFormat<GgufQ8_0>, __VA_ARGS__)    \
  X(q4k, GgufFormat<GgufQ4K>, __VA_ARGS__)     \
  X(q5k, GgufFormat<GgufQ5K>, __VA_ARGS__)     \
  X(q6k, GgufFormat<GgufQ6K>, __VA_ARGS__)     \
  X(iq4nl, GgufFormat<GgufIq4Nl>, __VA_ARGS__) \
  X(iq4xs, GgufFormat<GgufIq4Xs>, __VA_ARGS__)

// Formats that the quantized kernels are instantiated for, by their names in kernel names: X(name,
// format).
#pragma once

#define MLX_ANVIL_QUANTIZED_FORMATS(X, ...) \
  X(affine2, AffineFormat<2>, __VA_ARGS__)  \
  X(affine3, AffineFormat<3>, __VA_ARGS__)  \
  X(affine4, AffineFormat<4>, __VA_ARGS__)  \
  X(affine5, AffineFormat<5>, __VA_ARGS__)  \
  X(affine6, AffineFormat<6>, __VA_ARGS__)  \
  X(affine8, AffineFormat<8>, __VA_ARGS__)  \
  X(mxfp4, Mxfp4Format, __VA_ARGS__)        \
  X(mxfp8, Mxfp8Format, __VA_ARGS__)        \
  X(nvfp4, Nvfp4Format, __VA_ARGS__)

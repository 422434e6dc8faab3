// Primitives of matrices in GGUF's blocks.
#pragma once

#include "common/gate_options.h"
#include "common/primitive.h"
#include "gguf_matmul/problem.h"

namespace mlx_anvil {

struct GgufFormat {
  GgufKind kind;
  int32_t activation_bits = 0;  // as in QuantizedFormat

  bool operator==(const GgufFormat&) const = default;
};

// Multiplies x of any rank by w of rank 2, or x and w with equal leading dimensions.
mx::array apply_gguf_matmul(const char* op,
                            const GgufFormat& format,
                            QuantizedProduct product,
                            mx::array x,
                            mx::array w,
                            mx::Stream s);

// activation(x gate^T) * (x up^T) for x of rank 2 or more, and gate and up of rank 2.
mx::array apply_gguf_swiglu(const GgufFormat& format,
                            mx::array x,
                            mx::array gate,
                            mx::array up,
                            const GateOptions& activation,
                            mx::Stream s);

// Dequantises the rows `ids`, of 32 or 64 bits, of w of rank 2.
mx::array apply_gguf_rows(
    const char* op, GgufKind kind, mx::array ids, mx::array w, mx::Dtype dtype, mx::Stream s);

// Returns the sizes of a call. If w is shared, `rows` counts all rows of x.
QuantizedSizes gguf_sizes(GgufKind kind, const mx::array& x, const mx::array& w);

}  // namespace mlx_anvil

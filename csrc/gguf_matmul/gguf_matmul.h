// Ops on matrices in GGUF's own blocks of bytes: what quantized_matmul, quantized_gemv,
// quantized_swiglu, quantized_embedding, quantized_argmax and quantized_topk do in the modes of
// gguf_kind(). w is uint8 [..., N, bytes of a row].
#pragma once

#include <optional>

#include "common/gate_options.h"
#include "gguf_matmul/checks.h"
#include "quantized_head/quantized_head.h"

namespace mlx_anvil {

struct GgufOptions {
  GgufKind kind;
  std::optional<int> activation_bits = std::nullopt;
};

mx::array gguf_matmul(const mx::array& x,
                      const mx::array& w,
                      bool transpose,
                      const GgufOptions& options,
                      mx::StreamOrDevice stream);

// At most kQuantizedGemvRows rows of x per matrix.
mx::array gguf_gemv(const mx::array& x,
                    const mx::array& w,
                    const GgufOptions& options,
                    mx::StreamOrDevice stream);

mx::array gguf_swiglu(const mx::array& x,
                      const mx::array& gate,
                      const mx::array& up,
                      const GateOptions& activation,
                      const GgufOptions& options,
                      mx::StreamOrDevice stream);

// Dequantises the rows `ids` of w, in `dtype` or bfloat16.
mx::array gguf_embedding(const mx::array& ids,
                         const mx::array& w,
                         GgufKind kind,
                         const std::optional<mx::Dtype>& dtype,
                         mx::StreamOrDevice stream);

// The `kept` largest logits of x W^T, best first, or with `squeezed` the largest without an axis
// for it: indices and values.
BestLogits gguf_best_logits(const char* op,
                            const mx::array& x,
                            const mx::array& w,
                            int64_t kept,
                            bool squeezed,
                            const GgufOptions& options,
                            mx::StreamOrDevice stream);

}  // namespace mlx_anvil

// Checks of attention's arguments, for plain and for quantized keys and values (see
// common/checks.h).
#pragma once

#include "common/primitive.h"
#include "flash_attention/flash_attention.h"
#include "flash_attention/problem.h"

namespace mlx_anvil {

// Of quantized keys and values, k and v stand for the dequantized arrays: only their shapes count.
void check_attention_shapes(const char* op,
                            const mx::array& q,
                            const mx::array& k,
                            const mx::array& v);

// Scale, softcap and window.
AttentionConfig checked_attention_config(const AttentionOptions& options, int head_dim);

// Throws for row_invariant without a kernel that has it. `head_dim` is the larger one of keys and
// values. `why_composed` is empty if a kernel serves the call.
void check_row_invariant(const AttentionOptions& options,
                         int head_dim,
                         const std::string& why_composed,
                         mx::Stream s);

// Passes the arrays of the options as inputs of a node, and replaces them by these inputs.
void append_extras(Arrays& inputs, const AttentionOptions& options);
void replace_extras(AttentionOptions& options, const Arrays& inputs, size_t first);

struct AttentionExtras {
  std::optional<mx::array> mask;   // of rank 4; each dimension is 1 or that of the scores
  std::optional<mx::array> sinks;  // float32 [1, q_heads]
};

// Mask and sinks, which also enter `config`. `dtype` is that of the result.
AttentionExtras checked_attention_extras(AttentionConfig& config,
                                         const AttentionOptions& options,
                                         const mx::array& q,
                                         const mx::array& k,
                                         mx::Dtype dtype,
                                         mx::Stream s);

}  // namespace mlx_anvil

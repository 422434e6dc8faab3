// Converts the arrays of a call to kernel arguments.
#pragma once

#include "common/primitive.h"
#include "flash_attention/flash_attention.h"
#include "flash_attention/problem.h"

namespace mlx_anvil {

AttentionSizes sizes_of(const AttentionInputs& in);

AttentionView view_of(const mx::array& x);
AttentionOutput output_of(mx::array& x);

// Returns a view of `x` broadcast to `shape`, with stride 0 along broadcast axes.
mx::array stretched(const mx::array& x, const mx::Shape& shape);

// Allocates an output of rank 4. If `like` is a transposed view ([batch, length, head, dim] seen as
// [batch, head, length, dim]), the output uses the same layout: the model that made such a view
// will transpose the result back.
void allocate_like(mx::array& output, const mx::array& like, const mx::Stream& stream);

// Fills everything except the pointers that a pass adds. `mask` and `sinks` must be broadcast
// already.
void fill_operands(AttentionOperands& operands,
                   const AttentionConfig& config,
                   const AttentionInputs& in);

}  // namespace mlx_anvil

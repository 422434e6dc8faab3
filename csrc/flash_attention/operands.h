// From the arrays of a call to what its kernels are given.
#pragma once

#include "common/primitive.h"
#include "flash_attention/compose.h"
#include "flash_attention/problem.h"

namespace mlx_anvil {

AttentionSizes sizes_of(const AttentionInputs& in);

AttentionView view_of(const mx::array& x);
AttentionOutput output_of(mx::array& x);

// `x` with stride 0 along every axis that `shape` stretches; the memory is shared.
mx::array stretched(const mx::array& x, const mx::Shape& shape);

// Memory for an output of rank 4. Where `like` is a view that has its heads inside its rows
// ([batch, length, head, dim] seen as [batch, head, length, dim]), so has the output: the model
// that made such a view will undo it.
void allocate_like(mx::array& output, const mx::array& like, const mx::Stream& stream);

// All but the pointers that a pass adds. `mask` and `sinks` are stretched already.
void fill_operands(AttentionOperands& operands,
                   const AttentionConfig& config,
                   const AttentionInputs& in);

}  // namespace mlx_anvil

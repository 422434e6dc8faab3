// Converts the arrays of a call to kernel arguments.
#pragma once

#include "common/primitive.h"
#include "flash_attention/flash_attention.h"
#include "flash_attention/problem.h"
#include "flash_attention/sequences.h"

namespace mlx_anvil {

AttentionSizes sizes_of(const AttentionInputs& in);

AttentionView view_of(const mx::array& x);
AttentionOutput output_of(mx::array& x);

// Returns a view of `x` broadcast to `shape`, with stride 0 along broadcast axes.
mx::array stretched(const mx::array& x, const mx::Shape& shape);

// A call as the GPU's kernels run it: mask and sinks are broadcast. For use during an evaluation.
// Of k and v only the lengths count. If the kernels read no table of sequences, these are a mask.
MaskedAttention gpu_operands(const AttentionConfig& config,
                             AttentionInputs in,
                             bool reads_sequences,
                             mx::Stream s);

// Allocates an output of rank 4. If `like` is a transposed view ([batch, length, head, dim] seen as
// [batch, head, length, dim]), the output uses the same layout: the model that made such a view
// will transpose the result back.
void allocate_like(mx::array& output, const mx::array& like, const mx::Stream& stream);

// Fills mask and sinks for operands that have sizes. Each dimension is 1 or that of the scores.
void fill_mask_and_sinks(AttentionOperands& operands,
                         const std::optional<mx::array>& mask,
                         const std::optional<mx::array>& sinks);

// Without a table, sets nothing.
void fill_sequences(AttentionOperands& operands, const std::optional<mx::array>& sequences);

// Fills the table. `cache` is one array of the pages. Without a table, sets nothing.
void fill_pages(AttentionOperands& operands,
                const std::optional<mx::array>& pages,
                const mx::array& cache);

// Fills everything except the pointers that a pass adds.
void fill_operands(AttentionOperands& operands,
                   const AttentionConfig& config,
                   const AttentionInputs& in);

}  // namespace mlx_anvil

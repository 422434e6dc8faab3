// The sequences of a ragged batch as calls of their own, for the CPU drivers. The kernels know only
// batches whose rows are all in use.
#pragma once

#include <vector>

#include "flash_attention/quantized_problem.h"

namespace mlx_anvil {

// Calls on the rows of one sequence each; for a batch that is not ragged, the call itself. The
// table is clamped to rows that exist and that no sequence before it in the table has.
std::vector<AttentionForwardArgs> calls_of(const AttentionForwardArgs& args);
std::vector<QuantizedAttentionArgs> calls_of(const QuantizedAttentionArgs& args);
std::vector<AttentionBackwardArgs> calls_of(const AttentionBackwardArgs& args);

// For a ragged batch, sets all results to those of padding: queries and keys of no sequence.
void clear_results(const AttentionForwardArgs& args);
void clear_results(const AttentionBackwardArgs& args);

}  // namespace mlx_anvil

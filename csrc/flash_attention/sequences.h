// Ragged batches: sequences of unequal length, either padded to one length or packed one after the
// other.
//
// Both become a table, int32 [sequences, 5], whose columns are those of AttentionSequence. A query
// or key of no sequence is padding: no query sees such a key, and such a query sees no key.
#pragma once

#include "flash_attention/flash_attention.h"
#include "flash_attention/problem.h"

namespace mlx_anvil {

// Checks the lengths of a call of `op`, and returns their table. Empty if the call has none.
std::optional<mx::array> checked_sequences(const char* op,
                                           const AttentionLengths& lengths,
                                           const mx::array& q,
                                           const mx::array& k,
                                           mx::Stream s);

// The same for a call, which may have a plan.
std::optional<mx::array> sequences_of_call(const AttentionOptions& options,
                                           const mx::array& q,
                                           const mx::array& k,
                                           mx::Stream s);

// Where the sequences of `count` batches are once these are one batch: [count, sequences, 5] ->
// [count * sequences, 5].
mx::array fold_sequences(const mx::array& sequences, int batch, mx::Stream s);

// A call with a mask in place of sequences and window: for what reads no table.
struct MaskedAttention {
  AttentionConfig config;
  AttentionInputs in;
};

MaskedAttention mask_of_sequences(const AttentionConfig& config,
                                  const AttentionInputs& in,
                                  mx::Stream s);

// The same while a primitive is evaluated. The arrays of `in` have memory, and so has the mask.
MaskedAttention evaluated_mask_of_sequences(const AttentionConfig& config,
                                            const AttentionInputs& in,
                                            mx::Stream s);

}  // namespace mlx_anvil

// Attention of few queries over a cache in pages, which the kernels for GPUs read in place.
#pragma once

#include <optional>

#include "flash_attention/flash_attention.h"

namespace mlx_anvil {

// Returns true if the kernels read pages in place: on a GPU, for up to kDecodeRows queries, page
// sizes that are powers of two, and keys and values with heads that have kernels.
bool reads_pages(const mx::array& q,
                 const mx::array& k,
                 const mx::array& v,
                 const mx::array& table,
                 const mx::Stream& s);

// An array with the shape of a cache's gathered rows, for checks. It has no values.
mx::array shape_of_rows(const mx::array& cache, const mx::array& table);

// The table as the kernels read it. They clamp ids; int32 ids stay as they are.
mx::array kernel_table(const mx::array& table, int pages, mx::Stream s);

// The number of keys of each sequence of a padded batch.
mx::array key_counts(const mx::array& sequences, mx::Stream s);

// Empty if the kernels do not read these pages, or keys and values would have to be converted.
std::optional<AttentionResult> paged_decode(const mx::array& q,
                                            const mx::array& k,
                                            const mx::array& v,
                                            const mx::array& table,
                                            const AttentionOptions& options,
                                            mx::Stream s);

}  // namespace mlx_anvil

// Paged caches: keys and values in pages of one size, and a table of each sequence's pages.
//
// The pages of a call are gathered into one array, [batch, kv_heads, pages_per_sequence *
// page_size, ...], which then is a padded batch (sequences.h). MLX's ops give the derivatives.
#pragma once

#include <vector>

#include "common/checks.h"
#include "flash_attention/flash_attention.h"

namespace mlx_anvil {

// Checks a table, int [batch, pages_per_sequence], against q, `lengths` and the arrays of the
// cache, [pages, kv_heads, page_size, ...].
void check_pages(const mx::array& table,
                 const mx::array& q,
                 const AttentionLengths& lengths,
                 const std::vector<NamedArray>& caches,
                 const mx::Stream& s);

// The keys or values of each sequence, one page after the other. Page ids are clamped.
mx::array gather_pages(const mx::array& cache, const mx::array& table, mx::Stream s);

}  // namespace mlx_anvil

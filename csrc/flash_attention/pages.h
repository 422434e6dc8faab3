// Paged caches: keys and values in pages of one size, and a table of each sequence's pages.
//
// The pages of a call are gathered into one array, [batch, kv_heads, pages_per_sequence *
// page_size, ...], which then is a padded batch (sequences.h). MLX's ops give the derivatives. The
// kernels for few queries read pages in place instead (paged.h).
#pragma once

#include <utility>
#include <vector>

#include "common/checks.h"
#include "flash_attention/flash_attention.h"
#include "flash_attention/quantized.h"

namespace mlx_anvil {

// The keys and values of each sequence, one page after the other.
//
// The table is int [batch, pages_per_sequence]; k and v are [pages, kv_heads, page_size, ...]. The
// functions check these and `lengths`, and clamp page ids. Kernels that hide positions by a mask
// multiply what a hidden one holds by zero, and a page may hold the NaN of another request: for
// them, positions past a sequence's last key are set to zero.
std::pair<mx::array, mx::array> gather_pages(const mx::array& k,
                                             const mx::array& v,
                                             const mx::array& table,
                                             const mx::array& q,
                                             const AttentionLengths& lengths,
                                             mx::Stream s);

// The rows of one array of the cache. `clears`: those past a sequence's last key are zeros.
mx::array rows_of_pages(const mx::array& cache,
                        const mx::array& table,
                        const mx::array& lengths,
                        bool clears,
                        mx::Stream s);

// Throws unless the table, and the arrays of the cache, have the shapes above.
void check_pages(const mx::array& table,
                 const mx::array& q,
                 const AttentionLengths& lengths,
                 const std::vector<NamedArray>& caches,
                 const mx::Stream& s);

// The same in place, for quantized keys and values.
void gather_quantized_pages(QuantizedMatrix& k,
                            QuantizedMatrix& v,
                            const mx::array& table,
                            const mx::array& q,
                            const AttentionLengths& lengths,
                            mx::Stream s);

}  // namespace mlx_anvil

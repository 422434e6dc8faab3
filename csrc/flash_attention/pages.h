// Paged caches: keys and values in pages of one size, and a table of each sequence's pages.
//
// The table is int [batch, pages_per_sequence]; k and v are [pages, kv_heads, page_size, ...]. CPU
// kernels and decode kernels read pages in place. For everything else they are gathered into one
// array, [batch, kv_heads, pages_per_sequence * page_size, ...], which then is a padded batch
// (sequences.h).
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "common/checks.h"
#include "common/primitive.h"
#include "flash_attention/flash_attention.h"
#include "flash_attention/problem.h"
#include "flash_attention/quantized.h"

namespace mlx_anvil {

// Checks the shape and dtype of a table.
void check_table(const char* op,
                 const mx::array& table,
                 const AttentionLengths& lengths,
                 std::optional<int> batch);

// Calls use(row, column, page) for each page that holds keys of a sequence, if the host can read
// table and lengths.
void for_each_page_in_use(const mx::array& table,
                          const mx::array& lengths,
                          int page_size,
                          const mx::Stream& s,
                          const std::function<void(int64_t, int64_t, int64_t)>& use);

// Checks the table of a call, and the arrays of its cache.
void check_pages(const mx::array& table,
                 const mx::array& q,
                 const AttentionOptions& options,
                 const std::vector<NamedArray>& caches,
                 const mx::Stream& s);

// An array with the shape of the gathered rows, for checks. It has no values.
mx::array shape_of_rows(const mx::array& cache, const mx::array& table);

// Returns true if kernels read the pages in place: those of the CPU, and the decode kernels for
// GPUs if the page size is a power of two. `head_dim` is the larger one of keys and values.
bool reads_pages(
    const mx::array& cache, const mx::array& table, int q_len, int head_dim, mx::Stream s);

// The table as the kernels read it, which clamp its ids.
mx::array page_ids(const mx::array& table, mx::Stream s);

// The rows of each sequence, one page after the other. Ids are clamped.
mx::array gather_pages(const mx::array& cache, const mx::array& table, mx::Stream s);

// The same for one array of a call. Kernels that hide positions by a mask multiply what a hidden
// one holds by zero, and a page may hold the NaN of another request: for them, positions past a
// sequence's last key are set to zero.
mx::array gather_rows(const mx::array& cache,
                      const mx::array& table,
                      const mx::array& lengths,
                      mx::Stream s);

// A call with gathered keys and values, for what reads no pages.
struct ContiguousAttention {
  AttentionConfig config;
  AttentionInputs in;
};

ContiguousAttention without_pages(const AttentionConfig& config,
                                  const AttentionInputs& in,
                                  mx::Stream s);

// The same, with quantized keys and values.
QuantizedMatrix gather_pages(const QuantizedMatrix& cache, const mx::array& table, mx::Stream s);
QuantizedMatrix gather_rows(const QuantizedMatrix& cache,
                            const mx::array& table,
                            const mx::array& lengths,
                            mx::Stream s);
QuantizedAttentionInputs without_pages(const QuantizedAttentionInputs& in, mx::Stream s);

// The arrays of quantized keys and values, for check_pages().
std::vector<NamedArray> arrays_of_pages(const QuantizedMatrix& k, const QuantizedMatrix& v);

}  // namespace mlx_anvil

// The sequences of a ragged batch. Their table is int32 [sequences, 5]: batch, first query,
// queries, first key and keys of each (csrc/flash_attention/sequences.h), all within the arrays.
//
// Padded: the sequence of a batch is row `batch` of the table, and starts at query and key 0.
// Packed: each batch has the same number of sequences, one after the other. Rows of no sequence are
// at either end.
#pragma once

#include "metal/flash_attention/grid.h"
#include "metal/flash_attention/scores.h"

constant bool is_ragged [[function_constant(11)]];
constant bool is_packed [[function_constant(12)]];  // only if is_ragged

// Columns of the table.
enum {
  kFirstQueryColumn = 1,
  kQueriesColumn,
  kFirstKeyColumn,
  kKeysColumn,
  kSequenceColumns,
};

// The lengths of a threadgroup's sequence. Queries and keys are counted from its own first ones.
struct RaggedLengths {
  int query_count;  // that see keys
  int key_count;    // 0 without queries
  int row_count;    // of queries and of padding after them, which has results too
  int query_offset;
  int key_offset;
  int shift;

  METAL_FUNC int queries(constant AttentionParams& params) const thread {
    return is_ragged ? query_count : params.q_len;
  }
  METAL_FUNC int keys(constant AttentionParams& params) const thread {
    return is_ragged ? key_count : params.kv_len;
  }
  METAL_FUNC int rows(constant AttentionParams& params) const thread {
    return is_ragged ? row_count : params.q_len;
  }
  METAL_FUNC int first_query() const thread { return is_packed ? query_offset : 0; }
  METAL_FUNC int first_key() const thread { return is_packed ? key_offset : 0; }
  // The last query is aligned with the last key.
  METAL_FUNC int band_shift() const thread { return is_ragged ? shift : 0; }
  METAL_FUNC bool has_query(int query) const thread { return !is_ragged || query < query_count; }
};

METAL_FUNC RaggedLengths ragged_lengths(constant AttentionParams& params,
                                        const device int* sequence,
                                        int rows) {
  const int queries = sequence[kQueriesColumn];
  const int keys = queries > 0 ? sequence[kKeysColumn] : 0;
  const int shift = (keys - queries) - (params.kv_len - params.q_len);
  return {queries, keys, rows, sequence[kFirstQueryColumn], sequence[kFirstKeyColumn], shift};
}

// The lengths of a padded batch.
METAL_FUNC RaggedLengths lengths_of_batch(const device int* sequences,
                                          constant AttentionParams& params,
                                          int batch) {
  if (!is_ragged) {
    return RaggedLengths();
  }
  return ragged_lengths(params, sequences + batch * kSequenceColumns, params.q_len);
}

// The queries of one sequence that a threadgroup of the forward computes.
struct BlockOfQueries {
  RaggedLengths lengths;
  int first;  // in the sequence

  METAL_FUNC bool has_rows(constant AttentionParams& params) const thread {
    return !is_packed || first < lengths.rows(params);
  }
};

// Blocks of kRows queries. In a causal call the last blocks take longest, so they start first.
//
// In a packed batch, sequence i of n has the blocks from first_query / kRows + i on, counted from
// the last of the grid. These are enough for its queries, and at most one too many. The rows before
// the first sequence are number 0, and those after the last one number n + 1: both without keys.
template <int kRows>
METAL_FUNC BlockOfQueries block_of_queries(const device int* sequences,
                                           constant AttentionParams& params,
                                           GridPlace grid) {
  const int block = grid.blocks - 1 - grid.block;
  if (!is_packed) {
    return {lengths_of_batch(sequences, params, grid.batch), block * kRows};
  }
  const int count = grid.blocks - 2 - params.q_len / kRows;
  const device int* table = sequences + long(grid.batch) * count * kSequenceColumns;
  const device int* last = table + (count - 1) * kSequenceColumns;
  const int total = last[kFirstQueryColumn] + last[kQueriesColumn];
  int low = 0, high = count + 2;  // the sequence is one of [low, high)
  int begin = 0;                  // the first block of `low`
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    const int query =
        middle > count ? total : table[(middle - 1) * kSequenceColumns + kFirstQueryColumn];
    const int of_middle = query / kRows + middle;
    const bool is_below = of_middle <= block;
    low = is_below ? middle : low;
    begin = is_below ? of_middle : begin;
    high = is_below ? high : middle;
  }
  const int first = (block - begin) * kRows;
  if (low == 0) {
    return {{0, 0, table[kFirstQueryColumn], 0, 0, 0}, first};
  }
  if (low > count) {
    return {{0, 0, params.q_len - total, total, 0, 0}, first};
  }
  const device int* own = table + (low - 1) * kSequenceColumns;
  return {ragged_lengths(params, own, own[kQueriesColumn]), first};
}

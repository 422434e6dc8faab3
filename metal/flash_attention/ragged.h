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
// Only if is_ragged: packed, or a padded batch whose keys start anywhere, each with one sequence.
constant bool is_packed [[function_constant(12)]];

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
  int row_count;    // of the block's side, padding included, which has results too
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
  const int all_keys = sequence[kKeysColumn];
  const int keys = queries > 0 ? all_keys : 0;
  const int shift = (keys - queries) - (params.kv_len - params.q_len);
  return {queries, keys, rows, sequence[kFirstQueryColumn], sequence[kFirstKeyColumn], shift};
}

// Bytes from a mask's first element to that of a pair.
template <typename T>
METAL_FUNC long offset_in_mask(constant AttentionParams& params, int query, int key) {
  const long element = has_bool_mask ? 1 : sizeof(T);
  return (query * params.mask_strides[2] + key * params.mask_strides[3]) * element;
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

// The rows of one sequence that a threadgroup computes: queries, or for their gradients keys.
struct BlockOfRows {
  RaggedLengths lengths;
  int first;   // in the sequence
  int number;  // of the sequence in a packed batch, from 1 on

  METAL_FUNC bool has_rows() const thread { return !is_packed || first < lengths.row_count; }
};

// A packed batch counts the rows of its grid so that a block has rows of one sequence. Sequence i
// of n starts at row kUnit * (its first row / kUnit + i) of the grid, which leaves room for its
// rows and at most kUnit more. The rows before the first sequence are number 0, and those after the
// last one number n + 1: both without pairs of a query and a key.
template <int kUnit>
METAL_FUNC int row_in_grid(int first_row, int number) {
  return kUnit * (first_row / kUnit + number);
}

// Where sequence `number` of a table begins in the grid. `total` is the end of the last one.
template <int kUnit, int kFirst>
METAL_FUNC int begin_in_grid(const device int* table, int number, int count, int total) {
  const int of_table = metal::clamp(number - 1, 0, count - 1);
  const int first = number > count ? total : table[of_table * kSequenceColumns + kFirst];
  return number == 0 ? 0 : row_in_grid<kUnit>(first, number);
}

// The lengths of sequence `number` of a packed batch, which may be rows before the first one or
// after the last one.
template <bool kOfKeys>
METAL_FUNC RaggedLengths lengths_of_sequence(const device int* table,
                                             constant AttentionParams& params,
                                             int count,
                                             int number) {
  enum { kFirst = kOfKeys ? kFirstKeyColumn : kFirstQueryColumn, kCount = kFirst + 1 };
  const device int* own = table + (metal::clamp(number, 1, count) - 1) * kSequenceColumns;
  if (number > 0 && number <= count) {
    return ragged_lengths(params, own, own[kCount]);
  }
  const int first = own[kFirst], rows = own[kCount];
  const int begin = number == 0 ? 0 : first + rows;
  const int end = number == 0 ? first : kOfKeys ? params.kv_len : params.q_len;
  return {0, 0, end - begin, kOfKeys ? 0 : begin, kOfKeys ? begin : 0, 0};
}

// Returns the block that starts at `row` of the grid, which has `rows` keys or queries. Call with
// all lanes.
template <int kUnit, bool kOfKeys>
METAL_FUNC BlockOfRows block_of_rows(const device int* sequences,
                                     constant AttentionParams& params,
                                     int count,
                                     int batch,
                                     int row,
                                     uint lane) {
  const int rows = kOfKeys ? params.kv_len : params.q_len;
  if (!is_packed) {
    RaggedLengths lengths = lengths_of_batch(sequences, params, batch);
    lengths.row_count = rows;
    return {lengths, row, 0};
  }
  enum { kFirst = kOfKeys ? kFirstKeyColumn : kFirstQueryColumn, kCount = kFirst + 1 };
  const device int* table = sequences + long(batch) * count * kSequenceColumns;
  const device int* last = table + (count - 1) * kSequenceColumns;
  const int total = last[kFirst] + last[kCount];
  // The sequence is one of [low, high). Lanes look at 32 of them at once: loads that wait for each
  // other would take longer than the rows of a short sequence. The broadcast tells ptxas that all
  // lanes have the same: otherwise the loops over tiles would compute addresses in every lane.
  int low = 0, high = count + 2;
  while (high - low > 1) {
    const int step = (high - low + 31) / 32, number = low + int(lane) * step;
    const int begin = begin_in_grid<kUnit, kFirst>(table, number, count, total);
    const int last_below = metal::simd_max(number < high && begin <= row ? number : low);
    low = metal::simd_broadcast(last_below, ushort(0));
    high = metal::min(high, low + step);
  }
  const int begin = begin_in_grid<kUnit, kFirst>(table, low, count, total);
  return {lengths_of_sequence<kOfKeys>(table, params, count, low), row - begin, low};
}

// Blocks of kRows queries of the forward. In a causal call the last blocks take longest, so they
// start first.
template <int kRows>
METAL_FUNC BlockOfRows block_of_queries(const device int* sequences,
                                        constant AttentionParams& params,
                                        GridPlace grid,
                                        uint lane) {
  const int count = grid.blocks - 2 - params.q_len / kRows;
  return block_of_rows<kRows, false>(sequences, params, count, grid.batch,
                                     (grid.blocks - 1 - grid.block) * kRows, lane);
}

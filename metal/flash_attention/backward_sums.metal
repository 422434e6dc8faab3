// Gradients of the keys and values of flash_attention, from stored P and dS (stored_weights.h):
//   dV = P^T dO,  dK = scale dS^T Q
//
// Kernels: flash_attention_backward_sums_<dtype>_d<head dim>.
// Grid: (blocks of keys, kv heads of the chunk). Blocks of a packed batch: block_of_rows
// (ragged.h). Threadgroup: key_groups * column_groups * 32 x 1 x 1 (tiles.h). Bindings: weights,
// d_out or q, sequences, d_v or d_k, sums, params. Function constants: scores.h and ragged.h; 16:
// dK. Alignment: rows as rows_are_vectors promises; otherwise none. Columns of d_k and d_v are
// contiguous.
//
// A SIMD group computes kStoredRows keys x its columns. Where a chunk has not all queries that see
// a block of keys, the block's float32 sums go from chunk to chunk in `sums`, in the order of
// queries.
//
//   sums = 0, or those of the last chunk
//   for each query head of the group:
//     for each square of the chunk's rows that sees any key of the block:
//       stage the rows of dO, or of Q
//       sums += P^T dO, or dS^T Q
//   store sums; after the last chunk as the gradient
#include "metal/common/kernel.h"
#include "metal/common/tile.h"
#include "metal/flash_attention/ragged.h"
#include "metal/flash_attention/stored_weights.h"
#include "metal/flash_attention/tiles.h"

// Vectors of a tile that a thread loads before it waits for the others.
enum { kMostVectors = 4 };

constant bool makes_keys [[function_constant(16)]];  // dK; otherwise dV

template <typename T, int kColumns, int kKeyGroups, int kColumnGroups>
[[kernel, max_total_threads_per_threadgroup(kKeyGroups * kColumnGroups * 32)]] void
flash_attention_backward_sums(const device T* weights [[buffer(0)]],
                              const device T* operand [[buffer(1)]],
                              const device int* sequences [[buffer(2)]],
                              device T* gradient [[buffer(3)]],
                              device float* sums [[buffer(4)]],
                              constant AttentionBackwardParams& params [[buffer(5)]],
                              uint3 group [[threadgroup_position_in_grid]],
                              uint thread_index [[thread_index_in_threadgroup]],
                              uint simdgroup [[simdgroup_index_in_threadgroup]],
                              uint lane [[thread_index_in_simdgroup]]) {
  enum { kSimdgroups = kKeyGroups * kColumnGroups, kThreads = 32 * kSimdgroups };
  enum { kKeys = kStoredRows * kKeyGroups, kOwnColumns = kColumns / kColumnGroups };
  enum { kStride = TileRow<T, kColumns>::kStride };
  enum { kTileRows = kStride * sizeof(T) > 1024 ? kStoredRows / 2 : kStoredRows };
  using Share = TileShare<T, kTileRows, kColumns, kThreads>;
  using Sums = RegTile<float, kStoredRows, kOwnColumns>;
  alignas(16) threadgroup T tile[kTileRows * kStride];

  constant AttentionParams& common = params.common;
  const FragmentPlace place = fragment_place(lane);
  const int first_head = params.first_head + group.y * common.group;
  const int batch = first_head / common.q_heads, head = first_head % common.q_heads;
  const BlockOfRows of_block =
      block_of_rows<kKeys, true>(sequences, common, params.sequences, batch, group.x * kKeys, lane);
  if (!of_block.has_rows()) {
    return;
  }
  const RaggedLengths lengths = of_block.lengths;
  const int block = of_block.first, key_count = lengths.keys(common);
  const int first = block + simdgroup / kColumnGroups * kStoredRows;
  const int first_column = simdgroup % kColumnGroups * kOwnColumns;

  QueryRange seeing =
      seeing_queries(common, block, metal::min(block + kKeys, key_count) - 1, lengths);
  const bool sees_nothing = is_ragged && (block >= key_count || seeing.begin >= seeing.end);
  if (sees_nothing) {
    seeing = QueryRange{0, 0};
  }
  const QueryRange own =
      seeing_queries(common, first, metal::min(first + kStoredRows, key_count) - 1, lengths);
  // Rows of the chunk, counted from the sequence's first query.
  const int first_in_grid = is_packed && !sees_nothing
                                ? row_in_grid<kChunkRows>(lengths.query_offset, of_block.number)
                                : 0;
  const int first_row = params.first_row - first_in_grid;
  const int end_of_chunk = first_row + params.rows;
  const int begin = metal::max(seeing.begin, first_row);
  const int end = metal::min(seeing.end, end_of_chunk);
  const bool unseen = seeing.begin >= seeing.end && params.first_row == 0;
  if (begin >= end && !unseen) {
    return;
  }

  device float* const own_sums =
      sums + (group.x * kSimdgroups + simdgroup) * (kStoredRows * kOwnColumns) + 2 * lane;
  Sums total;
  total.zero();
  if (seeing.begin < first_row) {
    total.load_fragments(own_sums);
  }

  constant int64_t* const strides = makes_keys ? common.q_strides : params.d_out_strides;
  const int columns = makes_keys ? common.head_dim : common.v_head_dim;
  const int start = round_down(begin);
  for (int i = 0; i < common.group; ++i) {
    Rows<T> rows = rows_from(Rows<T>{operand + batch * strides[0] + (head + i) * strides[1] +
                                         lengths.first_query() * strides[2],
                                     strides[2], strides[3], lengths.queries(common), columns},
                             start);
    StoredStrips<const device T*> strips(weights + (makes_keys ? 64 : 0), params,
                                         group.y * common.group + i, start - first_row);
    for (int row = start; row < end; row += kTileRows) {
      if (rows_are_vectors && int(Share::kCount) <= kMostVectors) {
        Share share;
        share.load(rows, heads_fill_tile, thread_index);
        threadgroup_barrier(metal::mem_flags::mem_threadgroup);
        share.store(tile, thread_index);
      } else {
        threadgroup_barrier(metal::mem_flags::mem_threadgroup);
        copy_tile<T, kTileRows, kColumns, kThreads>(tile, rows, rows_are_vectors, thread_index,
                                                    heads_fill_tile);
      }
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      if (first < key_count && row < own.end && row + kTileRows > own.begin) {
        const int key = first - stored_range(common, round_down(row), lengths).begin;
        const device T* const at = strips.data + 16l * key;
        const ulong strip = 2 * ulong(strips.pairs);
        const int left = metal::min(int(kTileRows), end - row);
        if (has_band) {  // which takes the registers of a second strip
          add_products<1, kStride>(total, TransposedWeights<T, 1>{at, strip, place},
                                   tile + first_column, left);
        } else {
          add_products<2, kStride>(total, TransposedWeights<T, 2>{at, strip, place},
                                   tile + first_column, left);
        }
      }
      advance<kTileRows>(rows, rows_are_vectors);
      strips.data += ulong(strips.pairs) * (kTileRows / 4);
    }
  }

  if (seeing.end > end_of_chunk) {
    total.store_fragments(own_sums);
    return;
  }
  if (makes_keys) {
    total.scale(common.scale);
  }
  constant int64_t* const out_strides = makes_keys ? params.d_k_strides : params.d_v_strides;
  total.store(gradient + batch * out_strides[0] + head / common.group * out_strides[1] +
                  (lengths.first_key() + first) * out_strides[2] + first_column,
              out_strides[2], (is_ragged ? lengths.row_count : common.kv_len) - first,
              columns - first_column, place, rows_are_vectors, heads_fill_tile);
}

// ---- kernels

#define INSTANTIATE(dtype, type, d, key_groups, column_groups)      \
  MLX_ANVIL_KERNEL("flash_attention_backward_sums_" #dtype "_d" #d, \
                   flash_attention_backward_sums<type, d, key_groups, column_groups>)
MLX_ANVIL_ATTENTION_SUMS_TILES(INSTANTIATE)
#undef INSTANTIATE

// Gradient of the queries of flash_attention, and of an additive mask. backward.h has the formulas.
//
// Kernels: flash_attention_backward_dq_<dtype>_d<head dim>v<value head dim>.
// Grid: (blocks of queries, query heads, batch); grid.h may swap the first two. Blocks of a packed
// batch: block_of_rows (ragged.h). Threadgroup: simdgroups * 32 x 1 x 1 (tiles.h).
// Bindings: q, k, v, mask, sequences, lse, d_out, delta, d_q, d_mask, weights, params. d_mask and
// weights may be any buffer unless they are stored. Function constants: scores.h, ragged.h and
// grid.h; 8: store d_mask; 16: store weights, and compute a chunk of them, whose heads are along y
// of the grid (stored_weights.h). Alignment: rows as rows_are_vectors promises; otherwise none.
// Columns of d_q are contiguous.
//
//   keep this block of Q and dO; load lse and delta; dQ = 0
//   for each tile of keys that any query of the block sees (all tiles if d_mask is stored, which a
//   ragged batch fills with zeros before):
//     stage K and V
//     S = Q K^T; dP = dO V^T
//     P = 2^(S - lse); dS = P (dP - delta); store d_mask = dS before the slope of the softcap
//     store P and dS as weights
//     dQ += dS K
//   store scale dQ
#include "metal/common/kernel.h"
#include "metal/flash_attention/backward.h"
#include "metal/flash_attention/grid.h"
#include "metal/flash_attention/staging.h"
#include "metal/flash_attention/stored_weights.h"
#include "metal/flash_attention/tiles.h"

constant bool stores_weights [[function_constant(16)]];

template <typename T,
          int kHeadDim,
          int kValueDim,
          int kRowFragments,
          int kTileRows,
          Keeping kQueryKeeping,
          Keeping kCotangentKeeping,
          int kSimdgroups,
          Staging kStaging>
[[kernel, max_total_threads_per_threadgroup(kSimdgroups * 32)]] void flash_attention_backward_dq(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* v [[buffer(2)]],
    const device uchar* mask [[buffer(3)]],
    const device int* sequences [[buffer(4)]],
    const device float* lse [[buffer(5)]],
    const device T* d_out [[buffer(6)]],
    const device float* delta [[buffer(7)]],
    device T* d_q [[buffer(8)]],
    device float* d_mask [[buffer(9)]],
    device T* weights [[buffer(10)]],
    constant AttentionBackwardParams& params [[buffer(11)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  enum { kThreads = 32 * kSimdgroups };
  enum { kGroupRows = 8 * kRowFragments, kRows = kSimdgroups * kGroupRows };
  enum { kUnit = kRows > kChunkRows ? kRows : kChunkRows };  // of a packed batch (ragged.h)
  using Queries = KeptRows<T, kHeadDim, kGroupRows, kTileRows, kQueryKeeping>;
  using Cotangents = KeptRows<T, kValueDim, kGroupRows, kTileRows, kCotangentKeeping>;
  using Scores = RegTile<float, kGroupRows, kTileRows>;
  using Weights = RegTile<T, kGroupRows, kTileRows>;
  using Passing = PassingRows<T, kTileRows, kHeadDim, kValueDim, kThreads, kStaging>;
  alignas(16) threadgroup T key_tiles[Passing::kPlaces * Passing::kFirstSize];
  alignas(16) threadgroup T value_tiles[Passing::kPlaces * Passing::kSecondSize];
  alignas(16) threadgroup T kept_queries[Queries::kStaged ? kSimdgroups * Queries::kStaged : 1];
  alignas(16)
      threadgroup T kept_cotangents[Cotangents::kStaged ? kSimdgroups * Cotangents::kStaged : 1];

  constant AttentionParams& common = params.common;
  GridPlace grid = place_in_grid(group, groups);
  if (stores_weights) {
    const int of_batch = params.first_head + int(group.y);
    grid.head = of_batch % common.q_heads;
    grid.batch = of_batch / common.q_heads;
  }
  const int batch = grid.batch, head = grid.head, kv_head = head / common.group;
  // In a causal call the last blocks take longest, so they start first.
  const int row = (grid.blocks - 1 - grid.block) * kRows + (stores_weights ? params.first_row : 0);
  const BlockOfRows of_block =
      block_of_rows<kUnit, false>(sequences, common, params.sequences, batch, row, lane);
  if (!of_block.has_rows()) {
    return;
  }
  const RaggedLengths lengths = of_block.lengths;
  const int block = of_block.first, query_count = lengths.queries(common);
  if (is_packed) {
    const int first_query = lengths.query_offset, first_key = lengths.key_offset;
    q += first_query * common.q_strides[2];
    k += first_key * common.k_strides[2];
    v += first_key * common.v_strides[2];
    mask += offset_in_mask<T>(common, first_query, first_key);
    lse += first_query;
    d_out += first_query * params.d_out_strides[2];
    delta += first_query;
    d_q += first_query * params.d_q_strides[2];
    d_mask += stores_d_mask ? long(first_query) * common.kv_len : 0;
  }
  const int first = block + simdgroup * kGroupRows;
  const int last = metal::min(first + kGroupRows, query_count) - 1;
  const long head_row = (static_cast<long>(batch) * common.q_heads + head) * common.q_len;
  const HeadMask<T> head_mask = mask_of<T>(mask, common, batch, head);
  device float* head_d_mask = d_mask + (stores_d_mask ? head_row * common.kv_len : 0);
  const FragmentPlace place = fragment_place(lane);
  if (is_ragged && stores_d_mask) {  // pairs of the sequence are stored again below
    const int end = metal::min(block + kRows, lengths.row_count);
    for (int query = block; query < end; ++query) {
      for (int key = thread_index; key < common.kv_len; key += kThreads) {
        head_d_mask[long(query) * common.kv_len + key] = 0.0f;
      }
    }
    threadgroup_barrier(metal::mem_flags::mem_device);
    head_d_mask += lengths.first_key();
  }
  if (is_ragged && (block >= query_count || lengths.key_count == 0)) {  // padding
    RegTile<float, kGroupRows, kHeadDim> zeros;
    zeros.zero();
    zeros.store(d_q + batch * params.d_q_strides[0] + head * params.d_q_strides[1] +
                    first * params.d_q_strides[2],
                params.d_q_strides[2], lengths.row_count - first, common.head_dim, place,
                rows_are_vectors, heads_fill_tile);
    return;
  }

  const Rows<T> all_queries = {q + batch * common.q_strides[0] + head * common.q_strides[1],
                               common.q_strides[2], common.q_strides[3], query_count,
                               common.head_dim};
  const Rows<T> all_cotangents = {
      d_out + batch * params.d_out_strides[0] + head * params.d_out_strides[1],
      params.d_out_strides[2], params.d_out_strides[3], query_count, common.v_head_dim};
  Queries queries;
  queries.begin(all_queries, first, place);
  queries.template stage<kThreads>(kept_queries, all_queries, block, simdgroup, thread_index);
  Cotangents cotangents;
  cotangents.begin(all_cotangents, first, place);
  cotangents.template stage<kThreads>(kept_cotangents, all_cotangents, block, simdgroup,
                                      thread_index);
  RegTile<float, kGroupRows, kHeadDim> gradient;
  gradient.zero();
  SavedRow saved[kRowFragments];
  MLX_ANVIL_UNROLL
  for (int i = 0; i < kRowFragments; ++i) {
    saved[i] =
        load_saved_row(lse + head_row, delta + head_row, first + 8 * i + place.row, query_count);
  }

  KeyRange visible =
      visible_keys(common, block, metal::min(block + kRows, query_count) - 1, lengths);
  KeyRange own = visible_keys(common, first, last, lengths);
  const bool visits_all = stores_d_mask && !is_ragged;
  if (visits_all) {
    visible = own = KeyRange{0, common.kv_len};
  }
  // Weights are stored for whole squares, also where a query is out of range or sees nothing:
  // zeros.
  KeyRange stored = {0, 0};
  device T* stored_at = weights;  // the lane's place in the next block
  if (stores_weights) {
    const int square = round_down(first);
    stored = square < query_count ? stored_range(common, square, lengths) : stored;
    own = visits_all ? own : stored;
    const int in_chunk = (is_packed ? row + int(simdgroup) * kGroupRows : first) - params.first_row;
    stored_at = StoredStrips<device T*>(weights, params, group.y, in_chunk).data +
                (8 * place.row + place.column);
    visible.begin = round_down(visible.begin);
    visible.end = round_down(visible.end + kStoredRows - 1);
  }
  Passing passing;
  const Rows<T> keys = {k + batch * common.k_strides[0] + kv_head * common.k_strides[1],
                        common.k_strides[2], common.k_strides[3], lengths.keys(common),
                        common.head_dim};
  const Rows<T> values = {v + batch * common.v_strides[0] + kv_head * common.v_strides[1],
                          common.v_strides[2], common.v_strides[3], lengths.keys(common),
                          common.v_head_dim};
  passing.first_places = key_tiles;
  passing.second_places = value_tiles;
  passing.thread_index = thread_index;
  passing.start(keys, values, visible.begin);
  for (int begin = visible.begin; begin < visible.end; begin += kTileRows) {
    passing.take(begin, visible.end);
    if ((stores_weights || first < query_count) && begin < own.end &&
        begin + kTileRows > own.begin) {
      const int query = first + place.row, key = begin + place.column;
      Scores p = queries.multiply(passing.first_tile());
      Scores d_scores = cotangents.multiply(passing.second_tile());
      const bool all =
          sees_all(common, first, first + kGroupRows - 1, begin, begin + kTileRows, lengths);
      MLX_ANVIL_UNROLL
      for (int i = 0; i < kRowFragments; ++i) {
        p.map_row(i, query, key, d_scores,
                  ScoreGradient<T, false, kRowFragments == 1>{
                      all, saved[i], nullptr, begin, head_mask, head_d_mask, &common, lengths});
      }
      // In most tiles every pair is visible. One branch per tile replaces one per element.
      if (!all) {
        MLX_ANVIL_UNROLL
        for (int i = 0; i < kRowFragments; ++i) {
          p.map_row(i, query, key, d_scores,
                    VisiblePair{seen_keys(common, query + 8 * i, lengths)});
        }
      }
      const Weights rounded = d_scores.template to<T>();
      if (stores_weights && (!stores_d_mask || (begin >= stored.begin && begin < stored.end))) {
        store_weights(stored_at, 16l * params.stored_keys, p.template to<T>(), rounded);
        stored_at += 16 * kTileRows;
      }
      gradient.mma(rounded, SharedTile<T, Queries::kStride>{passing.first_tile(), place});
    }
  }
  gradient.scale(common.scale);
  gradient.store(d_q + batch * params.d_q_strides[0] + head * params.d_q_strides[1] +
                     first * params.d_q_strides[2],
                 params.d_q_strides[2], lengths.rows(common) - first, common.head_dim, place,
                 rows_are_vectors, heads_fill_tile);
}

// ---- kernels

#define INSTANTIATE(name, dtype, type, d, dv, ...)                              \
  MLX_ANVIL_KERNEL("flash_attention_backward_" name "_" #dtype "_d" #d "v" #dv, \
                   flash_attention_backward_dq<type, d, dv, __VA_ARGS__>)
#define INSTANTIATE_dq(suffix, ...) INSTANTIATE("dq" suffix, __VA_ARGS__)
#define INSTANTIATE_dkv(...)
#define INSTANTIATE_dk(...)
#define INSTANTIATE_dv(...)
#define INSTANTIATE_BACKWARD(pass, ...) INSTANTIATE_##pass("", __VA_ARGS__)
#define INSTANTIATE_BACKWARD_MATRIX(pass, ...) INSTANTIATE_##pass("_matrix", __VA_ARGS__)

MLX_ANVIL_ATTENTION_BACKWARD_TILES(INSTANTIATE_BACKWARD)
#ifdef __MSLC__  // too large for Apple's GPUs, which would not choose them
MLX_ANVIL_ATTENTION_BACKWARD_MATRIX_TILES(INSTANTIATE_BACKWARD_MATRIX)
#endif

#undef INSTANTIATE
#undef INSTANTIATE_dq
#undef INSTANTIATE_dkv
#undef INSTANTIATE_dk
#undef INSTANTIATE_dv
#undef INSTANTIATE_BACKWARD
#undef INSTANTIATE_BACKWARD_MATRIX

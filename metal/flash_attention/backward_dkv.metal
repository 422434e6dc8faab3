// Gradients of the keys and values of flash_attention. backward.h has the formulas.
//
// Kernels: flash_attention_backward_<pass>_<dtype>_d<head dim>v<value head dim>, where pass is dkv,
// dk or dv, with a suffix for GPUs with matrix units (tiles.h). dk and dv compute one gradient
// each, for heads too wide to hold both in registers. Grid: (blocks of keys, kv heads, batch);
// grid.h may swap the first two. Blocks of a packed batch: block_of_rows (ragged.h). Threadgroup:
// simdgroups * 32 x 1 x 1 (tiles.h). Bindings: q, k, v, mask, sequences, lse, d_out, delta, d_k,
// d_v, params; dkv_matrix_long: threadgroup memory 0 for two tiles of queries, two of cotangents,
// and the values. Function constants: scores.h, ragged.h and grid.h. Alignment: rows as
// rows_are_vectors promises; otherwise none. Columns of d_k and d_v are contiguous.
//
//   keep this block of K and V; dK = dV = 0
//   for each query head of the group:          (the sum over heads stays in registers)
//     for each tile of queries that sees any key of the block:
//       stage Q and dO; load lse and delta of the tile
//       S^T = K Q^T; dP^T = V dO^T
//       P^T = 2^(S^T - lse); dS^T = P^T (dP^T - delta)
//       dV += P^T dO; dK += dS^T Q
//   store scale dK and dV
#include "metal/common/kernel.h"
#include "metal/flash_attention/backward.h"
#include "metal/flash_attention/grid.h"
#include "metal/flash_attention/staging.h"
#include "metal/flash_attention/tiles.h"

// What a kernel is called with.
template <typename T>
struct KeyGradientCall {
  const device T* q;
  const device T* k;
  const device T* v;
  const device uchar* mask;
  const device int* sequences;
  const device float* lse;
  const device T* d_out;
  const device float* delta;
  device T* d_k;
  device T* d_v;
  GridPlace grid;
  uint thread_index;
  uint simdgroup;
  uint lane;

  // Moves all arrays to the first query and key of a packed sequence.
  METAL_FUNC void start_sequence(constant AttentionBackwardParams& params,
                                 RaggedLengths lengths) thread {
    constant AttentionParams& common = params.common;
    const int query = lengths.query_offset, key = lengths.key_offset;
    q += query * common.q_strides[2];
    k += key * common.k_strides[2];
    v += key * common.v_strides[2];
    mask += offset_in_mask<T>(common, query, key);
    lse += query;
    d_out += query * params.d_out_strides[2];
    delta += query;
    d_k += key * params.d_k_strides[2];
    d_v += key * params.d_v_strides[2];
  }
};

template <typename T,
          int kHeadDim,
          int kValueDim,
          int kRowFragments,
          int kTileRows,
          Keeping kKeyKeeping,
          Keeping kValueKeeping,
          int kSimdgroups,
          Staging kStaging,
          bool kMakesKeys,
          bool kMakesValues>
struct KeyGradientBlock {
  enum { kThreads = 32 * kSimdgroups };
  enum { kGroupRows = 8 * kRowFragments, kRows = kSimdgroups * kGroupRows };
  using Keys = KeptRows<T, kHeadDim, kGroupRows, kTileRows, kKeyKeeping>;
  using Values = KeptRows<T, kValueDim, kGroupRows, kTileRows, kValueKeeping>;
  using Scores = RegTile<float, kGroupRows, kTileRows>;
  using Passing = PassingRows<T, kTileRows, kHeadDim, kValueDim, kThreads, kStaging>;
  using KeyGradient = RegTile<float, kGroupRows, kHeadDim>;
  using ValueGradient = RegTile<float, kGroupRows, kValueDim>;
  // Elements in threadgroup memory.
  enum { kOfQueries = Passing::kPlaces * Passing::kFirstSize };
  enum { kOfCotangents = Passing::kPlaces * Passing::kSecondSize };
  enum { kOfKeys = kSimdgroups * Keys::kStaged, kOfValues = kSimdgroups * Values::kStaged };

  METAL_FUNC static void compute(KeyGradientCall<T> call,
                                 constant AttentionBackwardParams& params,
                                 threadgroup T* query_tiles,
                                 threadgroup T* d_out_tiles,
                                 threadgroup SavedRow* saved_tiles,
                                 threadgroup T* kept_keys,
                                 threadgroup T* kept_values) {
    constant AttentionParams& common = params.common;
    const GridPlace grid = call.grid;
    const int batch = grid.batch, kv_head = grid.head;
    const BlockOfRows of_block = block_of_rows<kRows, true>(
        call.sequences, common, params.sequences, batch, grid.block * kRows, call.lane);
    if (!of_block.has_rows()) {
      return;
    }
    const RaggedLengths lengths = of_block.lengths;
    if (is_packed) {
      call.start_sequence(params, lengths);
    }
    const int block = of_block.first, key_count = lengths.keys(common);
    const int first = block + call.simdgroup * kGroupRows;
    // A ragged batch stores its rows of padding as well.
    const int last =
        (is_ragged ? first + kGroupRows : metal::min(first + kGroupRows, common.kv_len)) - 1;
    const FragmentPlace place = fragment_place(call.lane);
    KeyGradient key_gradient;
    ValueGradient value_gradient;
    key_gradient.zero();
    value_gradient.zero();
    if (is_ragged && block >= key_count) {  // padding
      store(key_gradient, value_gradient, call, params, lengths, first, place);
      return;
    }

    const Rows<T> all_keys = {call.k + batch * common.k_strides[0] + kv_head * common.k_strides[1],
                              common.k_strides[2], common.k_strides[3], key_count, common.head_dim};
    const Rows<T> all_values = {
        call.v + batch * common.v_strides[0] + kv_head * common.v_strides[1], common.v_strides[2],
        common.v_strides[3], key_count, common.v_head_dim};
    Keys keys;
    keys.begin(all_keys, first, place);
    Values values;
    values.begin(all_values, first, place);
    keys.template stage<kThreads>(kept_keys, all_keys, block, call.simdgroup, call.thread_index);
    values.template stage<kThreads>(kept_values, all_values, block, call.simdgroup,
                                    call.thread_index);

    const QueryRange seeing =
        seeing_queries(common, block, metal::min(block + kRows, key_count) - 1, lengths);
    const QueryRange own = seeing_queries(common, first, last, lengths);
    Passing passing;
    passing.first_places = query_tiles;
    passing.second_places = d_out_tiles;
    passing.thread_index = call.thread_index;
    PassingSavedRows<kTileRows> saved;
    saved.tiles = saved_tiles;
    saved.q_len = lengths.queries(common);
    saved.thread_index = call.thread_index;
    const int heads = seeing.begin < seeing.end ? common.group : 0;
    for (int head = kv_head * common.group; head < kv_head * common.group + heads; ++head) {
      const long head_row = (static_cast<long>(batch) * common.q_heads + head) * common.q_len;
      const HeadMask<T> head_mask = mask_of<T>(call.mask, common, batch, head);
      const Rows<T> queries = {call.q + batch * common.q_strides[0] + head * common.q_strides[1],
                               common.q_strides[2], common.q_strides[3], lengths.queries(common),
                               common.head_dim};
      const Rows<T> cotangents = {
          call.d_out + batch * params.d_out_strides[0] + head * params.d_out_strides[1],
          params.d_out_strides[2], params.d_out_strides[3], lengths.queries(common),
          common.v_head_dim};
      passing.start(queries, cotangents, seeing.begin);
      saved.lse = call.lse + head_row;
      saved.delta = call.delta + head_row;
      saved.load(seeing.begin);
      saved.store(1 - passing.turn);
      for (int begin = seeing.begin; begin < seeing.end; begin += kTileRows) {
        passing.take(begin, seeing.end);
        saved.load(begin + kTileRows);
        if (first < key_count && begin < own.end && begin + kTileRows > own.begin) {
          const threadgroup T* const query_tile = passing.first_tile();
          const threadgroup T* const d_out_tile = passing.second_tile();
          const int key = first + place.row, query = begin + place.column;
          Scores p = keys.multiply(query_tile);
          Scores d_scores;
          if (kMakesKeys) {
            d_scores = values.multiply(d_out_tile);
          } else {
            d_scores.zero();
          }
          // Out-of-range queries have P = 0 by their saved rows, and out-of-range keys are not
          // stored.
          const bool all = sees_all(common, begin, begin + kTileRows - 1, first, last + 1, lengths);
          p.map(
              key, place.column, d_scores,
              ScoreGradient<T, true, kRowFragments == 1>{
                  all, {}, saved.tile(passing.turn), begin, head_mask, nullptr, &common, lengths});
          // In most tiles every pair is visible. One branch per tile replaces one per element.
          if (!all) {
            p.map(key, query, VisibleWeight<true>{&common, lengths});
            d_scores.map(key, query, VisibleWeight<true>{&common, lengths});
          }
          if (kMakesValues) {
            value_gradient.mma(p.template to<T>(),
                               SharedTile<T, Values::kStride>{d_out_tile, place});
          }
          if (kMakesKeys) {
            key_gradient.mma(d_scores.template to<T>(),
                             SharedTile<T, Keys::kStride>{query_tile, place});
          }
        }
        saved.store(1 - passing.turn);
      }
    }
    store(key_gradient, value_gradient, call, params, lengths, first, place);
  }

 private:
  // Stores a SIMD group's rows.
  METAL_FUNC static void store(thread KeyGradient& key_gradient,
                               thread ValueGradient& value_gradient,
                               KeyGradientCall<T> call,
                               constant AttentionBackwardParams& params,
                               RaggedLengths lengths,
                               int first,
                               FragmentPlace place) {
    constant AttentionParams& common = params.common;
    const int batch = call.grid.batch, kv_head = call.grid.head;
    const int rows = (is_ragged ? lengths.row_count : common.kv_len) - first;
    if (kMakesKeys) {
      key_gradient.scale(common.scale);
      key_gradient.store(call.d_k + batch * params.d_k_strides[0] +
                             kv_head * params.d_k_strides[1] + first * params.d_k_strides[2],
                         params.d_k_strides[2], rows, common.head_dim, place, rows_are_vectors,
                         heads_fill_tile);
    }
    if (kMakesValues) {
      value_gradient.store(call.d_v + batch * params.d_v_strides[0] +
                               kv_head * params.d_v_strides[1] + first * params.d_v_strides[2],
                           params.d_v_strides[2], rows, common.v_head_dim, place, rows_are_vectors,
                           heads_fill_tile);
    }
  }
};

template <typename T,
          int kHeadDim,
          int kValueDim,
          int kRowFragments,
          int kTileRows,
          Keeping kKeyKeeping,
          Keeping kValueKeeping,
          int kSimdgroups,
          Staging kStaging,
          bool kMakesKeys,
          bool kMakesValues>
[[kernel, max_total_threads_per_threadgroup(kSimdgroups * 32)]] void flash_attention_backward_dkv(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* v [[buffer(2)]],
    const device uchar* mask [[buffer(3)]],
    const device int* sequences [[buffer(4)]],
    const device float* lse [[buffer(5)]],
    const device T* d_out [[buffer(6)]],
    const device float* delta [[buffer(7)]],
    device T* d_k [[buffer(8)]],
    device T* d_v [[buffer(9)]],
    constant AttentionBackwardParams& params [[buffer(10)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Block = KeyGradientBlock<T, kHeadDim, kValueDim, kRowFragments, kTileRows, kKeyKeeping,
                                 kValueKeeping, kSimdgroups, kStaging, kMakesKeys, kMakesValues>;
  alignas(16) threadgroup T query_tiles[Block::kOfQueries];
  alignas(16) threadgroup T d_out_tiles[Block::kOfCotangents];
  threadgroup SavedRow saved_tiles[2 * kTileRows];
  alignas(16) threadgroup T kept_keys[Block::kOfKeys ? Block::kOfKeys : 1];
  alignas(16) threadgroup T kept_values[Block::kOfValues ? Block::kOfValues : 1];
  Block::compute({q, k, v, mask, sequences, lse, d_out, delta, d_k, d_v,
                  place_in_grid(group, groups), thread_index, simdgroup, lane},
                 params, query_tiles, d_out_tiles, saved_tiles, kept_keys, kept_values);
}

template <typename T,
          int kHeadDim,
          int kValueDim,
          int kRowFragments,
          int kTileRows,
          Keeping kKeyKeeping,
          Keeping kValueKeeping,
          int kSimdgroups,
          Staging kStaging,
          bool kMakesKeys,
          bool kMakesValues>
[[kernel, max_total_threads_per_threadgroup(kSimdgroups * 32)]] void
flash_attention_backward_dkv_large(const device T* q [[buffer(0)]],
                                   const device T* k [[buffer(1)]],
                                   const device T* v [[buffer(2)]],
                                   const device uchar* mask [[buffer(3)]],
                                   const device int* sequences [[buffer(4)]],
                                   const device float* lse [[buffer(5)]],
                                   const device T* d_out [[buffer(6)]],
                                   const device float* delta [[buffer(7)]],
                                   device T* d_k [[buffer(8)]],
                                   device T* d_v [[buffer(9)]],
                                   constant AttentionBackwardParams& params [[buffer(10)]],
                                   threadgroup uint4* memory [[threadgroup(0)]],
                                   uint3 group [[threadgroup_position_in_grid]],
                                   uint3 groups [[threadgroups_per_grid]],
                                   uint thread_index [[thread_index_in_threadgroup]],
                                   uint simdgroup [[simdgroup_index_in_threadgroup]],
                                   uint lane [[thread_index_in_simdgroup]]) {
  using Block = KeyGradientBlock<T, kHeadDim, kValueDim, kRowFragments, kTileRows, kKeyKeeping,
                                 kValueKeeping, kSimdgroups, kStaging, kMakesKeys, kMakesValues>;
  threadgroup SavedRow saved_tiles[2 * kTileRows];
  threadgroup T* const queries = reinterpret_cast<threadgroup T*>(memory);
  threadgroup T* const cotangents = queries + Block::kOfQueries;
  threadgroup T* const keys = cotangents + Block::kOfCotangents;
  Block::compute({q, k, v, mask, sequences, lse, d_out, delta, d_k, d_v,
                  place_in_grid(group, groups), thread_index, simdgroup, lane},
                 params, queries, cotangents, saved_tiles, keys, keys + Block::kOfKeys);
}

// ---- kernels

#define INSTANTIATE(function, name, makes_keys, makes_values, dtype, type, d, dv, ...) \
  MLX_ANVIL_KERNEL("flash_attention_backward_" name "_" #dtype "_d" #d "v" #dv,        \
                   function<type, d, dv, __VA_ARGS__, makes_keys, makes_values>)
#define INSTANTIATE_dkv(suffix, ...) \
  INSTANTIATE(flash_attention_backward_dkv, "dkv" suffix, true, true, __VA_ARGS__)
#define INSTANTIATE_dk(suffix, ...) \
  INSTANTIATE(flash_attention_backward_dkv, "dk" suffix, true, false, __VA_ARGS__)
#define INSTANTIATE_dv(suffix, ...) \
  INSTANTIATE(flash_attention_backward_dkv, "dv" suffix, false, true, __VA_ARGS__)
#define INSTANTIATE_dq(...)
#define INSTANTIATE_BACKWARD(pass, ...) INSTANTIATE_##pass("", __VA_ARGS__)
#define INSTANTIATE_BACKWARD_MATRIX(pass, ...) INSTANTIATE_##pass("_matrix", __VA_ARGS__)
#define INSTANTIATE_BACKWARD_LONG(pass, ...) \
  INSTANTIATE(flash_attention_backward_dkv_large, "dkv_matrix_long", true, true, __VA_ARGS__)

#ifdef __MSLC__  // Apple's GPUs store P and dS instead (stored_weights.h)
MLX_ANVIL_ATTENTION_BACKWARD_KEYS_TILES(INSTANTIATE_BACKWARD)
MLX_ANVIL_ATTENTION_BACKWARD_MATRIX_TILES(INSTANTIATE_BACKWARD_MATRIX)
MLX_ANVIL_ATTENTION_BACKWARD_LONG_TILES(INSTANTIATE_BACKWARD_LONG)
#endif

#undef INSTANTIATE
#undef INSTANTIATE_dkv
#undef INSTANTIATE_dk
#undef INSTANTIATE_dv
#undef INSTANTIATE_dq
#undef INSTANTIATE_BACKWARD
#undef INSTANTIATE_BACKWARD_MATRIX
#undef INSTANTIATE_BACKWARD_LONG

// Forward of flash_attention for more than a few queries:
//   s[i, j] = cap(scale * q[i] . k[j]) + mask[i, j],  cap(x) = softcap * tanh(x / softcap)
//   lse[i]  = log(sum over visible j of exp(s[i, j]) (+ exp(sink)))
//   out[i]  = sum over visible j of exp(s[i, j] - lse[i]) v[j]
//
// Kernels: flash_attention_<pass>_<dtype>_d<head dim>v<value head dim>, where pass is forward,
// forward_matrix, forward_matrix_long or forward_matrix_tall (tiles.h).
// Grid: (blocks of queries, query heads, batch); grid.h may swap the first two.
// Threadgroup: simdgroups * 32 x 1 x 1 (tiles.h).
// Bindings: q, k, v, mask, sinks, out, lse, params; long and tall: threadgroup memory 0 for two
// tiles of keys, two of values and, if they are kept there, the queries.
// Function constants: scores.h (stores_lse included) and grid.h.
// Alignment: rows as rows_are_vectors promises; otherwise none. Columns of out are contiguous.
//
//   each simdgroup: load its 8 or 16 rows of q; m = sink or -inf; sum = 0; out = 0
//   for each block of keys that any query of the threadgroup sees:
//     stage the block of keys and values in threadgroup memory
//     if the simdgroup sees any of it:
//       S = cap(q k^T) with mask and band; rescale by the new maximum
//       P = 2^(S - m); sum += rowsum(P); out += P v
//   sum = rowsum over lanes + 2^(sink - m)
//   store lse = ln 2 (m + log2(sum)) and out / sum
#include "metal/common/kernel.h"
#include "metal/flash_attention/forward.h"
#include "metal/flash_attention/grid.h"
#include "metal/flash_attention/staging.h"
#include "metal/flash_attention/tiles.h"

// What a kernel is called with.
template <typename T>
struct ForwardCall {
  const device T* q;
  const device T* k;
  const device T* v;
  const device uchar* mask;
  const device float* sinks;
  device T* out;
  device float* lse;
  GridPlace grid;
  uint thread_index;
  uint simdgroup;
  uint lane;
};

template <typename T,
          int kHeadDim,
          int kValueDim,
          int kRowFragments,
          int kKeys,
          Keeping kKeeping,
          int kSimdgroups,
          Staging kStaging>
struct ForwardBlock {
  using GroupRows = ForwardRows<T, kHeadDim, kValueDim, kRowFragments, kKeys, kKeeping>;
  enum { kThreads = 32 * kSimdgroups, kGroupRows = 8 * kRowFragments };
  enum { kRows = kSimdgroups * kGroupRows };
  using Passing = PassingRows<T, kKeys, kHeadDim, kValueDim, kThreads, kStaging>;
  // Elements in threadgroup memory.
  enum { kOfKeys = Passing::kPlaces * Passing::kFirstSize };
  enum { kOfValues = Passing::kPlaces * Passing::kSecondSize };

  METAL_FUNC static void compute(ForwardCall<T> call,
                                 constant AttentionForwardParams& params,
                                 threadgroup T* key_tiles,
                                 threadgroup T* value_tiles,
                                 threadgroup T* kept_queries) {
    constant AttentionParams& common = params.common;
    const GridPlace grid = call.grid;
    const int batch = grid.batch, head = grid.head, kv_head = head / common.group;
    // In a causal call the last blocks take longest, so they start first.
    const int first = (grid.blocks - 1 - grid.block) * kRows;
    const int last = metal::min(first + kRows, common.q_len) - 1;

    const Rows<T> queries = {call.q + batch * common.q_strides[0] + head * common.q_strides[1],
                             common.q_strides[2], common.q_strides[3], common.q_len,
                             common.head_dim};
    const HeadMask<T> head_mask = mask_of<T>(call.mask, common, batch, head);

    const float sink =
        has_sinks ? M_LOG2E_F *
                        call.sinks[batch * common.sinks_strides[0] + head * common.sinks_strides[1]]
                  : -INFINITY;
    GroupRows rows;
    rows.place = fragment_place(call.lane);
    rows.first = first + call.simdgroup * kGroupRows;
    rows.begin(queries, sink);
    rows.q.template stage<kThreads>(kept_queries, queries, first, call.simdgroup,
                                    call.thread_index);

    const KeyRange visible = visible_keys(common, first, last);
    const KeyRange own =
        visible_keys(common, rows.first, metal::min(rows.first + kGroupRows, common.q_len) - 1);
    const Rows<T> keys = {call.k + batch * common.k_strides[0] + kv_head * common.k_strides[1],
                          common.k_strides[2], common.k_strides[3], common.kv_len, common.head_dim};
    const Rows<T> values = {call.v + batch * common.v_strides[0] + kv_head * common.v_strides[1],
                            common.v_strides[2], common.v_strides[3], common.kv_len,
                            common.v_head_dim};
    Passing passing;
    passing.first_places = key_tiles;
    passing.second_places = value_tiles;
    passing.thread_index = call.thread_index;
    passing.start(keys, values, visible.begin);
    for (int begin = visible.begin; begin < visible.end; begin += kKeys) {
      passing.take(begin, visible.end);
      if (rows.first < common.q_len && begin < own.end && begin + kKeys > own.begin) {
        rows.attend(passing.first_tile(), passing.second_tile(), begin, head_mask, common);
      }
    }

    MLX_ANVIL_UNROLL
    for (int i = 0; i < kRowFragments; ++i) {
      const int query = rows.query(i);
      float total = row_sum(rows.softmax[i].sum);
      if (has_sinks) {
        total = rows.softmax[i].add_sink(sink, total);
      }
      if (query >= common.q_len) {
        continue;
      }
      if (stores_lse && rows.place.column == 0) {
        call.lse[(static_cast<long>(batch) * common.q_heads + head) * common.q_len + query] =
            rows.softmax[i].log_sum_exp(total);
      }
      rows.out.scale_row(i, inverse_of_total(total));
      rows.out.store_row(i,
                         call.out + batch * params.out_strides[0] + head * params.out_strides[1] +
                             query * params.out_strides[2],
                         0, common.v_head_dim, rows.place, rows_are_vectors, heads_fill_tile);
    }
  }
};

template <typename T,
          int kHeadDim,
          int kValueDim,
          int kRowFragments,
          int kKeys,
          Keeping kKeeping,
          int kSimdgroups,
          Staging kStaging>
[[kernel, max_total_threads_per_threadgroup(kSimdgroups * 32)]] void flash_attention_forward(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* v [[buffer(2)]],
    const device uchar* mask [[buffer(3)]],
    const device float* sinks [[buffer(4)]],
    device T* out [[buffer(5)]],
    device float* lse [[buffer(6)]],
    constant AttentionForwardParams& params [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Block =
      ForwardBlock<T, kHeadDim, kValueDim, kRowFragments, kKeys, kKeeping, kSimdgroups, kStaging>;
  alignas(16) threadgroup T key_tiles[Block::kOfKeys];
  alignas(16) threadgroup T value_tiles[Block::kOfValues];
  Block::compute(
      {q, k, v, mask, sinks, out, lse, place_in_grid(group, groups), thread_index, simdgroup, lane},
      params, key_tiles, value_tiles, nullptr);
}

template <typename T,
          int kHeadDim,
          int kValueDim,
          int kRowFragments,
          int kKeys,
          Keeping kKeeping,
          int kSimdgroups,
          Staging kStaging>
[[kernel, max_total_threads_per_threadgroup(kSimdgroups * 32)]] void flash_attention_forward_large(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* v [[buffer(2)]],
    const device uchar* mask [[buffer(3)]],
    const device float* sinks [[buffer(4)]],
    device T* out [[buffer(5)]],
    device float* lse [[buffer(6)]],
    constant AttentionForwardParams& params [[buffer(7)]],
    threadgroup uint4* memory [[threadgroup(0)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Block =
      ForwardBlock<T, kHeadDim, kValueDim, kRowFragments, kKeys, kKeeping, kSimdgroups, kStaging>;
  threadgroup T* const keys = reinterpret_cast<threadgroup T*>(memory);
  threadgroup T* const values = keys + Block::kOfKeys;
  Block::compute(
      {q, k, v, mask, sinks, out, lse, place_in_grid(group, groups), thread_index, simdgroup, lane},
      params, keys, values, values + Block::kOfValues);
}

// ---- kernels

#define INSTANTIATE(name, function, dtype, type, d, dv, ...)           \
  MLX_ANVIL_KERNEL("flash_attention_" name "_" #dtype "_d" #d "v" #dv, \
                   function<type, d, dv, __VA_ARGS__>)
#define INSTANTIATE_FORWARD(...) INSTANTIATE("forward", flash_attention_forward, __VA_ARGS__)
#define INSTANTIATE_FORWARD_MATRIX(...) \
  INSTANTIATE("forward_matrix", flash_attention_forward, __VA_ARGS__)
#define INSTANTIATE_FORWARD_LONG(...) \
  INSTANTIATE("forward_matrix_long", flash_attention_forward_large, __VA_ARGS__)
#define INSTANTIATE_FORWARD_TALL(...) \
  INSTANTIATE("forward_matrix_tall", flash_attention_forward_large, __VA_ARGS__)

MLX_ANVIL_ATTENTION_FORWARD_TILES(INSTANTIATE_FORWARD)
#ifdef __MSLC__  // too large for Apple's GPUs, which would not choose them
MLX_ANVIL_ATTENTION_FORWARD_MATRIX_TILES(INSTANTIATE_FORWARD_MATRIX)
MLX_ANVIL_ATTENTION_FORWARD_LONG_TILES(INSTANTIATE_FORWARD_LONG)
MLX_ANVIL_ATTENTION_FORWARD_TALL_TILES(INSTANTIATE_FORWARD_TALL)
#endif

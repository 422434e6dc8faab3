// Forward of flash_attention for more than a few queries:
//   s[i, j] = cap(scale * q[i] . k[j]) + mask[i, j],  cap(x) = softcap * tanh(x / softcap)
//   lse[i]  = log(sum over visible j of exp(s[i, j]) (+ exp(sink)))
//   out[i]  = sum over visible j of exp(s[i, j] - lse[i]) v[j]
//
// Kernels: flash_attention_<forward|forward_matrix>_<dtype>_d<head dim>v<value head dim>.
// Grid: (blocks of queries, query heads, batch); grid.h may swap the first two.
// Threadgroup: simdgroups * 32 x 1 x 1 (tiles.h).
// Bindings: q, k, v, mask, sinks, out, lse, params.
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

template <typename T,
          int kHeadDim,
          int kValueDim,
          int kRowFragments,
          int kKeys,
          bool kKeepsQ,
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
  using GroupRows = ForwardRows<T, kHeadDim, kValueDim, kRowFragments, kKeys, kKeepsQ>;
  enum { kThreads = 32 * kSimdgroups, kGroupRows = 8 * kRowFragments };
  enum { kRows = kSimdgroups * kGroupRows };
  using Passing = PassingRows<T, kKeys, kHeadDim, kValueDim, kThreads, kStaging>;
  alignas(16) threadgroup T key_tiles[Passing::kPlaces * Passing::kFirstSize];
  alignas(16) threadgroup T value_tiles[Passing::kPlaces * Passing::kSecondSize];

  constant AttentionParams& common = params.common;
  const GridPlace grid = place_in_grid(group, groups);
  const int batch = grid.batch, head = grid.head, kv_head = head / common.group;
  // In a causal call the last blocks take longest, so they start first.
  const int first = (grid.blocks - 1 - grid.block) * kRows;
  const int last = metal::min(first + kRows, common.q_len) - 1;

  const Rows<T> queries = {q + batch * common.q_strides[0] + head * common.q_strides[1],
                           common.q_strides[2], common.q_strides[3], common.q_len, common.head_dim};
  const HeadMask<T> head_mask = mask_of<T>(mask, common, batch, head);

  const float sink =
      has_sinks
          ? M_LOG2E_F * sinks[batch * common.sinks_strides[0] + head * common.sinks_strides[1]]
          : -INFINITY;
  GroupRows rows;
  rows.place = fragment_place(lane);
  rows.first = first + simdgroup * kGroupRows;
  rows.begin(queries, sink);

  const KeyRange visible = visible_keys(common, first, last);
  const KeyRange own =
      visible_keys(common, rows.first, metal::min(rows.first + kGroupRows, common.q_len) - 1);
  const Rows<T> keys = {k + batch * common.k_strides[0] + kv_head * common.k_strides[1],
                        common.k_strides[2], common.k_strides[3], common.kv_len, common.head_dim};
  const Rows<T> values = {v + batch * common.v_strides[0] + kv_head * common.v_strides[1],
                          common.v_strides[2], common.v_strides[3], common.kv_len,
                          common.v_head_dim};
  Passing passing;
  passing.first_places = key_tiles;
  passing.second_places = value_tiles;
  passing.thread_index = thread_index;
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
      lse[(static_cast<long>(batch) * common.q_heads + head) * common.q_len + query] =
          rows.softmax[i].log_sum_exp(total);
    }
    rows.out.scale_row(i, inverse_of_total(total));
    rows.out.store_row(i,
                       out + batch * params.out_strides[0] + head * params.out_strides[1] +
                           query * params.out_strides[2],
                       0, common.v_head_dim, rows.place, rows_are_vectors, heads_fill_tile);
  }
}

// ---- kernels

#define INSTANTIATE(name, dtype, type, d, dv, ...)                     \
  MLX_ANVIL_KERNEL("flash_attention_" name "_" #dtype "_d" #d "v" #dv, \
                   flash_attention_forward<type, d, dv, __VA_ARGS__>)
#define INSTANTIATE_FORWARD(...) INSTANTIATE("forward", __VA_ARGS__)
#define INSTANTIATE_FORWARD_MATRIX(...) INSTANTIATE("forward_matrix", __VA_ARGS__)

MLX_ANVIL_ATTENTION_FORWARD_TILES(INSTANTIATE_FORWARD)
#ifdef __MSLC__  // too large for Apple's GPUs, which would not choose them
MLX_ANVIL_ATTENTION_FORWARD_MATRIX_TILES(INSTANTIATE_FORWARD_MATRIX)
#endif

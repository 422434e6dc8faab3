// flash_attention, gradients. Formulas and tiling: backward.h. No atomics: every sum has one owner
// and one order.
//
// Kernels: flash_attention_backward_dq_<dtype>_<tile>, flash_attention_backward_dkv_<dtype>_<tile>;
// tiles as for the forward. Bindings: q, k, v, mask, lse, d_out, delta; d_q and d_mask, or d_k and
// d_v; params; an absent one may be any buffer. Grid: blocks of queries, query heads, batch; or
// blocks of keys, kv heads, batch. Threadgroup: 128 x 1 x 1. Function constants 0 to 2, 4 and 7.
#include "metal/flash_attention/backward.h"

template <typename T, int kHeadDim, int kVHeadDim, int kTileRows, int kFragmentRows, bool kHold>
[[kernel, max_total_threads_per_threadgroup(kAttentionThreads)]] void flash_attention_backward_dq(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* v [[buffer(2)]],
    const device void* mask [[buffer(3)]],
    const device float* lse [[buffer(4)]],
    const device T* d_out [[buffer(5)]],
    const device float* delta [[buffer(6)]],
    device T* d_q [[buffer(7)]],
    device float* d_mask [[buffer(8)]],
    constant AttentionParams& params [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Backward =
      AttentionBackward<T, false, kHeadDim, kVHeadDim, kTileRows, kFragmentRows, kHold>;
  using KTile = typename Backward::HeadTile;
  using VTile = typename Backward::ValueTile;
  threadgroup T k_tile[KTile::kSize];
  threadgroup T v_tile[VTile::kSize];

  const int head = group.y, batch = group.z;
  const int kv_head = head / (params.q_heads / params.kv_heads);
  const int first = (groups.x - 1 - group.x) * Backward::kGroupRows;
  const int row = first + simdgroup * Backward::kRows;
  const int last_of_group = metal::min(first + Backward::kGroupRows, params.q_len) - 1;
  const int last = metal::min(row + Backward::kRows, params.q_len) - 1;
  const long head_index = static_cast<long>(batch) * params.q_heads + head;
  const DeviceMatrix<T> keys =
      head_rows(k, params.k_strides, batch, kv_head, params.kv_len, params.head_dim);
  const DeviceMatrix<T> values =
      head_rows(v, params.v_strides, batch, kv_head, params.kv_len, params.v_head_dim);
  const MaskView<T> mask_view(mask, params, batch, head);
  device float* d_mask_head =
      d_mask + (store_d_mask ? head_index * params.q_len * params.kv_len : 0);

  Backward backward(
      params, fragment_place(lane), row,
      head_rows(q, params.q_strides, batch, head, params.q_len, params.head_dim),
      head_rows(d_out, params.d_out_strides, batch, head, params.q_len, params.v_head_dim));
  MLX_ANVIL_UNROLL
  for (int r = 0; r < kFragmentRows; ++r) {
    backward.saved[r] = load_saved_row(lse, delta, head_index * params.q_len,
                                       row + 8 * r + backward.place.row, params.q_len);
  }
  // The gradient of the mask is written for every pair, so then every tile is visited.
  const Range everything = {0, params.kv_len};
  const Range visited = store_d_mask ? everything : keys_of_any(params, first, last_of_group);
  const Range of_rows = store_d_mask ? everything : keys_of_any(params, row, last);
  const Range seen = row <= last ? of_rows : Range{0, 0};
  const Range seen_by_all = keys_of_all(params, row, last);
  for (int key = visited.begin / kTileRows * kTileRows; key < visited.end; key += kTileRows) {
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the last tile has been used
    KTile::template stage<kAttentionThreads>(k_tile, keys, key, thread_index, vector_loads);
    VTile::template stage<kAttentionThreads>(v_tile, values, key, thread_index, vector_loads);
    threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (!seen.meets(key, kTileRows)) {
      continue;
    }
    backward.multiply(k_tile, v_tile);
    backward.finish(mask_view, nullptr, key, !seen_by_all.contains(key, kTileRows), d_mask_head);
    backward.accumulate(k_tile, v_tile);
  }
  backward.store_head(d_q + batch * params.d_q_strides[0] + head * params.d_q_strides[1],
                      params.d_q_strides[2]);
}

template <typename T, int kHeadDim, int kVHeadDim, int kTileRows, int kFragmentRows, bool kHold>
[[kernel, max_total_threads_per_threadgroup(kAttentionThreads)]] void flash_attention_backward_dkv(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* v [[buffer(2)]],
    const device void* mask [[buffer(3)]],
    const device float* lse [[buffer(4)]],
    const device T* d_out [[buffer(5)]],
    const device float* delta [[buffer(6)]],
    device T* d_k [[buffer(7)]],
    device T* d_v [[buffer(8)]],
    constant AttentionParams& params [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Backward = AttentionBackward<T, true, kHeadDim, kVHeadDim, kTileRows, kFragmentRows, kHold>;
  using QTile = typename Backward::HeadTile;
  using DOutTile = typename Backward::ValueTile;
  threadgroup T q_tile[QTile::kSize];
  threadgroup T d_out_tile[DOutTile::kSize];
  threadgroup SavedRow saved[kTileRows];

  const int kv_head = group.y, batch = group.z;
  const int heads = params.q_heads / params.kv_heads;
  const int first = group.x * Backward::kGroupRows;
  const int row = first + simdgroup * Backward::kRows;
  const int last_of_group = metal::min(first + Backward::kGroupRows, params.kv_len) - 1;
  const int last = metal::min(row + Backward::kRows, params.kv_len) - 1;

  Backward backward(
      params, fragment_place(lane), row,
      head_rows(k, params.k_strides, batch, kv_head, params.kv_len, params.head_dim),
      head_rows(v, params.v_strides, batch, kv_head, params.kv_len, params.v_head_dim));
  const Range visited = queries_of_any(params, first, last_of_group);
  const Range seeing = row <= last ? queries_of_any(params, row, last) : Range{0, 0};
  const Range seeing_all = queries_of_all(params, row, last);
  for (int head = kv_head * heads; head < (kv_head + 1) * heads; ++head) {
    const long head_index = static_cast<long>(batch) * params.q_heads + head;
    const DeviceMatrix<T> queries =
        head_rows(q, params.q_strides, batch, head, params.q_len, params.head_dim);
    const DeviceMatrix<T> d_outs =
        head_rows(d_out, params.d_out_strides, batch, head, params.q_len, params.v_head_dim);
    const MaskView<T> mask_view(mask, params, batch, head);
    for (int query = visited.begin / kTileRows * kTileRows; query < visited.end;
         query += kTileRows) {
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);  // the last tile has been used
      QTile::template stage<kAttentionThreads>(q_tile, queries, query, thread_index, vector_loads);
      DOutTile::template stage<kAttentionThreads>(d_out_tile, d_outs, query, thread_index,
                                                  vector_loads);
      if (thread_index < kTileRows) {
        saved[thread_index] = load_saved_row(lse, delta, head_index * params.q_len,
                                             query + thread_index, params.q_len);
      }
      threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      if (!seeing.meets(query, kTileRows)) {
        continue;
      }
      backward.multiply(q_tile, d_out_tile);
      backward.finish(mask_view, saved, query, !seeing_all.contains(query, kTileRows), nullptr);
      backward.accumulate(q_tile, d_out_tile);
    }
  }
  backward.store_head(d_k + batch * params.d_k_strides[0] + kv_head * params.d_k_strides[1],
                      params.d_k_strides[2]);
  backward.store_value(d_v + batch * params.d_v_strides[0] + kv_head * params.d_v_strides[1],
                       params.d_v_strides[2]);
}

// Rows of a tile, fragments of rows of a SIMD group, and whether the kept rows stay in registers. A
// row of fragments takes of every thread, in registers: for dQ, (2 head_dim + v_head_dim) / 4, half
// of which less where T has 16 bits and rows are kept; for dK and dV, (head_dim + v_head_dim) / 2
// likewise. Two of them fit small heads; of large ones not even one, so that their kept rows are
// read again and again.
#define INSTANTIATE(pass, dtype, T, tile, head_dim, v_head_dim, rows, fragment_rows, hold)      \
  template [[host_name("flash_attention_backward_" #pass "_" #dtype "_" #tile)]] [[kernel]]     \
  decltype(flash_attention_backward_##pass<T, head_dim, v_head_dim, rows, fragment_rows, hold>) \
      flash_attention_backward_##pass<T, head_dim, v_head_dim, rows, fragment_rows, hold>;

#define INSTANTIATE_16_BIT(dtype, T)                          \
  INSTANTIATE(dq, dtype, T, d32, 32, 32, 32, 2, true)         \
  INSTANTIATE(dq, dtype, T, d64, 64, 64, 32, 2, true)         \
  INSTANTIATE(dq, dtype, T, d72, 72, 72, 32, 2, true)         \
  INSTANTIATE(dq, dtype, T, d80, 80, 80, 32, 2, true)         \
  INSTANTIATE(dq, dtype, T, d96, 96, 96, 32, 2, true)         \
  INSTANTIATE(dq, dtype, T, d128, 128, 128, 32, 1, true)      \
  INSTANTIATE(dq, dtype, T, d192_128, 192, 128, 32, 1, true)  \
  INSTANTIATE(dq, dtype, T, d192, 192, 192, 32, 1, true)      \
  INSTANTIATE(dq, dtype, T, d256, 256, 256, 16, 1, true)      \
  INSTANTIATE(dkv, dtype, T, d32, 32, 32, 32, 2, true)        \
  INSTANTIATE(dkv, dtype, T, d64, 64, 64, 32, 2, true)        \
  INSTANTIATE(dkv, dtype, T, d72, 72, 72, 32, 1, true)        \
  INSTANTIATE(dkv, dtype, T, d80, 80, 80, 32, 1, true)        \
  INSTANTIATE(dkv, dtype, T, d96, 96, 96, 32, 1, true)        \
  INSTANTIATE(dkv, dtype, T, d128, 128, 128, 32, 1, true)     \
  INSTANTIATE(dkv, dtype, T, d192_128, 192, 128, 16, 1, true) \
  INSTANTIATE(dkv, dtype, T, d192, 192, 192, 16, 1, true)     \
  INSTANTIATE(dkv, dtype, T, d256, 256, 256, 16, 1, false)

INSTANTIATE_16_BIT(float16, half)
INSTANTIATE_16_BIT(bfloat16, bfloat)
INSTANTIATE(dq, float32, float, d32, 32, 32, 32, 2, true)
INSTANTIATE(dq, float32, float, d64, 64, 64, 16, 2, true)
INSTANTIATE(dq, float32, float, d72, 72, 72, 16, 1, true)
INSTANTIATE(dq, float32, float, d80, 80, 80, 16, 1, true)
INSTANTIATE(dq, float32, float, d96, 96, 96, 16, 1, true)
INSTANTIATE(dq, float32, float, d128, 128, 128, 16, 1, true)
INSTANTIATE(dq, float32, float, d192_128, 192, 128, 16, 1, true)
INSTANTIATE(dq, float32, float, d192, 192, 192, 16, 1, false)
INSTANTIATE(dq, float32, float, d256, 256, 256, 8, 1, false)
INSTANTIATE(dkv, float32, float, d32, 32, 32, 32, 2, true)
INSTANTIATE(dkv, float32, float, d64, 64, 64, 16, 1, true)
INSTANTIATE(dkv, float32, float, d72, 72, 72, 16, 1, true)
INSTANTIATE(dkv, float32, float, d80, 80, 80, 16, 1, true)
INSTANTIATE(dkv, float32, float, d96, 96, 96, 16, 1, true)
INSTANTIATE(dkv, float32, float, d128, 128, 128, 16, 1, true)
INSTANTIATE(dkv, float32, float, d192_128, 192, 128, 16, 1, false)
INSTANTIATE(dkv, float32, float, d192, 192, 192, 16, 1, false)
INSTANTIATE(dkv, float32, float, d256, 256, 256, 8, 1, false)

#undef INSTANTIATE
#undef INSTANTIATE_16_BIT
